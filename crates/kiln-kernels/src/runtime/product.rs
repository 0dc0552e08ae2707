//! Products of matrices.

use burn::tensor::Tensor;

/// `a b` for `[.., m, k]` and `[.., k, n]`, where leading dimensions are equal or 1: `[.., m, n]`. The
/// product is as exact as the type of the factors.
///
/// On CUDA this is not Burn's `matmul`, which multiplies float32 numbers in TF32, with 10 bits, from compute
/// capability 8.0 on, and panics if a tensor core routine rejects a shape.
pub fn product<const D: usize>(a: Tensor<D>, b: Tensor<D>) -> Tensor<D> {
    #[cfg(feature = "cuda")]
    let (a, b) = match cuda::product(a, b) {
        Ok(product) => return product,
        Err(others) => others,
    };
    a.matmul(b)
}

#[cfg(feature = "cuda")]
mod cuda {
    use burn::{
        backend::{Cube, DispatchDevice, cubecl::dtype_to_storage_type},
        tensor::{DType, Shape, Tensor},
    };
    use burn_cubecl::{CubeDevice, ops::numeric::empty_device_dtype};
    use cubek::{
        matmul::{
            definition::{MatmulElems, MatmulGlobalElems},
            launch::launch_ref,
            multi_level::Strategy,
        },
        std::InputBinding,
    };

    use crate::runtime::launch::primitive;

    /// Multiplies on CUDA.
    ///
    /// # Errors
    /// Returns the factors, if they are not on CUDA or no routine takes them.
    #[allow(clippy::result_large_err, reason = "both are tensors")]
    pub(super) fn product<const D: usize>(
        a: Tensor<D>,
        b: Tensor<D>,
    ) -> Result<Tensor<D>, (Tensor<D>, Tensor<D>)> {
        let device = a.device();
        if !matches!(device.as_dispatch(), DispatchDevice::Cube(CubeDevice::Cuda(_)))
            || a.dtype() != b.dtype()
        {
            return Err((a, b));
        }
        let (of_a, of_b) = (a.dims(), b.dims());
        let shape: [usize; D] = std::array::from_fn(|i| match D - i {
            1 => of_b[i],
            2 => of_a[i],
            _ => of_a[i].max(of_b[i]),
        });
        let (left, right) = (primitive(a.clone()), primitive(b.clone()));
        let dtype = left.dtype;
        let elem = dtype_to_storage_type(dtype);
        // The fastest on an H100 first (docs/measurements/nvidia.md). A routine refuses shapes, layouts and
        // devices that it does not take.
        let with_tensor_cores = [
            Strategy::SpecializedTmaMma(Default::default()),
            Strategy::OrderedDoubleMma(Default::default()),
            Strategy::SimpleCyclicCmma(Default::default()),
        ];
        let without = [Strategy::SimpleUnit(Default::default()), Strategy::Naive];
        for strategy in with_tensor_cores.into_iter().filter(|_| dtype != DType::F32).chain(without) {
            let out = empty_device_dtype(left.client.clone(), left.device.clone(), Shape::from(shape), dtype);
            let mut elems = MatmulElems::from_globals(&MatmulGlobalElems { lhs: elem, rhs: elem, out: elem });
            let [x, y] = [&left, &right].map(|factor| InputBinding::new(factor.clone().binding(), elem));
            let written = out.clone().binding();
            if launch_ref(&strategy.into(), &out.client, x, y, written, &mut elems).is_ok() {
                return Ok(Tensor::from_primitive::<Cube>(out));
            }
        }
        Err((a, b))
    }
}
