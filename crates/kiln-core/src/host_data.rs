//! Tensor data in host memory that are copied to a device repeatedly.

use std::{ops::Deref, sync::Arc};

use burn::tensor::{DType, TensorData};
use burn_std::{AllocationProperty, Bytes};

/// Creates tensor data that share `bytes` with their clones. Copying a clone to a device makes no copy in
/// host memory first.
pub fn shared(bytes: Arc<Vec<u8>>, shape: Vec<usize>, dtype: DType) -> TensorData {
    of_owner(Owner(bytes), shape, dtype)
}

/// Makes `data` shareable with its clones. Copying a clone to a device makes no copy in host memory first.
pub fn shareable(data: TensorData) -> TensorData {
    let (shape, dtype) = (data.shape().to_vec(), data.dtype());
    of_owner(Owner(Arc::new(data.into_bytes())), shape, dtype)
}

/// Keeps memory alive until the last clone is dropped.
struct Owner<T>(Arc<T>);

impl<T: Deref<Target = [u8]>> AsRef<[u8]> for Owner<T> {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

fn of_owner<T>(owner: Owner<T>, shape: Vec<usize>, dtype: DType) -> TensorData
where
    T: Deref<Target = [u8]> + Send + Sync + 'static,
{
    let bytes = bytes::Bytes::from_owner(owner);
    TensorData::from_bytes(Bytes::from_shared(bytes, AllocationProperty::Native), shape, dtype)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clones_share_memory_until_one_is_written() {
        let bytes = Arc::new([1f32, 2.0].iter().flat_map(|number| number.to_le_bytes()).collect());
        let data = shared(Arc::clone(&bytes), vec![2], DType::F32);
        let mut other = data.clone();
        assert_eq!(data.as_bytes().as_ptr(), bytes.as_ptr());
        assert_eq!(other.as_bytes().as_ptr(), bytes.as_ptr());
        other.as_mut_slice::<f32>().expect("it is float32")[0] = 9.0;
        assert_eq!(data.iter::<f32>().collect::<Vec<_>>(), [1.0, 2.0]);
        assert_eq!(other.iter::<f32>().collect::<Vec<_>>(), [9.0, 2.0]);
    }

    #[test]
    fn shareable_data_keeps_its_elements_and_shares_memory_with_clones() {
        let data = shareable(TensorData::new(vec![1i32, -2, 3], [3]));
        assert_eq!(data.iter::<i32>().collect::<Vec<_>>(), [1, -2, 3]);
        assert_eq!(data.clone().as_bytes().as_ptr(), data.as_bytes().as_ptr());
    }
}
