//! A decoding step of attention: the key and the value of a token are written into buffers, and its query
//! attends to all keys there. On a GPU, that is one launch fewer than [`KvAppend`] and [`Attention`].

use burn::tensor::Tensor;
use kiln_core::{layer::RowPosition, view::DenseKv};

use super::{APPEND, Attention, AttentionShape, cases, checked_sinks};
use crate::{
    cache::kv_append::KvAppend,
    runtime::{kernel::Kernel, kernels::Kernels, shader::Shader},
    testing::{
        case::Case,
        checked::Checked,
        cut::{Extent, cut_rows},
    },
};

/// [`KvAppend`] of one token in each row, then [`Attention`] over the buffers.
///
/// Returns the result of attention, the keys and the values. The buffers are written in place if they are the
/// only handles of their memory, and copied otherwise. The GPU kernels take up to 8 query heads that share a
/// key head, or 4 with vectors of more than 128 numbers.
#[derive(Clone, Debug)]
pub struct AttentionAppend {
    /// `[batch, heads, 1, head_dim]`
    pub q: Tensor<4>,
    /// The new keys and values, and the buffers that hold the others, in the type of q.
    pub append: KvAppend,
    /// First position that counts.
    pub start: usize,
    /// Largest number of slots of a row, if rows share the buffers. See [`DenseKv::shared`].
    pub shared: Option<usize>,
    pub shape: AttentionShape,
    /// See [`Attention::sinks`].
    pub sinks: Option<Tensor<1>>,
}

impl AttentionAppend {
    /// Runs this kernel if that saves a launch, and the two others if not. These take queries of several
    /// tokens, too.
    pub fn run(self, kernels: &Kernels) -> [Tensor<4>; 3] {
        if kernels.implementation_of::<Self>().is_on_gpu() && self.is_one_launch() {
            return kernels.run(self);
        }
        self.in_two(|append| kernels.run(append), |attention| kernels.run(attention))
    }

    /// Writes with one kernel, and attends with the other.
    fn in_two(
        self,
        write: impl FnOnce(KvAppend) -> [Tensor<4>; 2],
        attend: impl FnOnce(Attention) -> Tensor<4>,
    ) -> [Tensor<4>; 3] {
        let Self { q, append, start, shared, shape, sinks } = self;
        let (positions, origin) = (append.positions.clone(), append.origin);
        let [keys, values] = write(append);
        let kv = DenseKv { keys: keys.clone(), values: values.clone(), start, origin, shared };
        let chain = vec![kv.of_rows(q.dims()[0])];
        [attend(Attention { q, chain, positions, shape, sinks }), keys, values]
    }

    #[cfg(not(feature = "cube"))]
    fn is_one_launch(&self) -> bool {
        false
    }

    /// Whether the GPU kernels take the inputs: a workgroup has all queries that see a new key, and so writes
    /// it before it reads it.
    #[cfg(feature = "cube")]
    fn is_one_launch(&self) -> bool {
        use super::{
            LARGEST_HEAD,
            sharing::{Rows, Sharing},
        };

        let Self { q, append: KvAppend { buffers, new, positions, .. }, start, shared, shape, .. } = self;
        let (dims, device) = (q.dims(), q.device());
        let [batch, _, tokens, head_dim] = dims;
        let [[_, kv_heads, all, width], of_values] = buffers.each_ref().map(Tensor::dims);
        let of_one_type = buffers.iter().chain(new).all(|tensor| tensor.dtype() == q.dtype());
        let is_common = shape.causal && !shape.latent && shape.end.is_none() && head_dim <= LARGEST_HEAD;
        if !is_common || !of_one_type || tokens != 1 || width != head_dim || of_values != buffers[0].dims() {
            return false;
        }
        if q.shape().num_elements() == 0 || all == 0 {
            return false;
        }
        let slots = [batch, kv_heads, shared.unwrap_or(all), head_dim];
        let sharing = Sharing::new(dims, slots, shape, &device);
        #[cfg(feature = "wgpu")]
        {
            use super::pieces;
            let splits = pieces::splits(&[sharing], self.sinks.is_some());
            if !pieces::is_whole(dims, kv_heads, splits, pieces::most(&device)) {
                return false;
            }
        }
        matches!(sharing.rows, Rows::Few { .. })
            && sharing.tiles == 1
            && positions.on_host.iter().all(|row| row.visible_from.max(*start) <= row.first)
    }

    /// Makes the buffers writable, and attends to them.
    #[cfg(feature = "cube")]
    fn launch(
        self,
        attend: impl FnOnce(
            Tensor<4>,
            super::Buffers,
            &[Tensor<4>; 2],
            Tensor<2, burn::tensor::Int>,
            Option<Tensor<1>>,
        ) -> Tensor<4>,
    ) -> [Tensor<4>; 3] {
        use burn::backend::Cube;

        use super::Buffers;
        use crate::runtime::launch::{primitive, to_write};

        let Self { q, append: KvAppend { buffers, new, positions, origin }, start, shared, shape, sinks } =
            self;
        let [keys, values] =
            buffers.map(|buffer| Tensor::from_primitive::<Cube>(to_write(primitive(buffer))));
        let kv = DenseKv { keys: keys.clone(), values: values.clone(), start, origin, shared };
        let buffers = Buffers::new(kv.of_rows(q.dims()[0]), &shape);
        [attend(q, buffers, &new, positions.on_device, sinks), keys, values]
    }
}

impl Kernel for AttentionAppend {
    const NAME: &'static str = "attention_append";
    type Output = [Tensor<4>; 3];

    fn checked(self) -> Self {
        let Self { q, append, start, shared, shape, sinks } = self;
        let append = append.checked();
        let [batch, heads, tokens, _] = q.dims();
        let [new_batch, kv_heads, new_tokens, _] = append.new[0].dims();
        assert_eq!(
            [new_batch, new_tokens],
            [batch, tokens],
            "attention_append: new keys and q {:?}",
            q.dims()
        );
        assert!(heads.is_multiple_of(kv_heads), "attention_append: {heads} heads share {kv_heads} of keys");
        let ends_at = |row: &RowPosition| row.first + tokens;
        match shared {
            Some(slots) => {
                let end = append.positions.on_host.iter().map(ends_at).max();
                assert!(end.is_none_or(|end| end <= slots), "attention_append: {slots} slots of a row");
            }
            None => {
                let held = append.buffers[0].dims()[0];
                assert_eq!(held, batch, "attention_append: rows of the buffers");
            }
        }
        let sinks = checked_sinks(sinks, heads, Self::NAME);
        Self { q, append, start, shared, shape, sinks }
    }

    fn shape(&self) -> Vec<usize> {
        self.q.dims().into()
    }

    fn reference(self) -> [Tensor<4>; 3] {
        self.in_two(KvAppend::reference, |attention| attention.checked().reference())
    }

    #[cfg(feature = "wgpu")]
    fn wgsl(self) -> Result<[Tensor<4>; 3], Self> {
        if self.is_one_launch() { Ok(self.launch(super::wgsl::appending)) } else { Err(self) }
    }

    #[cfg(feature = "cube")]
    fn cube(self) -> Result<[Tensor<4>; 3], Self> {
        if self.is_one_launch() { Ok(self.launch(super::cube::appending)) } else { Err(self) }
    }
}

impl Checked for AttentionAppend {
    fn extent(&self) -> [usize; 2] {
        self.append.extent()
    }

    fn part(self, part: Extent) -> Self {
        if self.shared.is_some() {
            return self;
        }
        Self { q: cut_rows(self.q, &part[0]), append: self.append.part(part), ..self }
    }

    fn part_of(whole: [Tensor<4>; 3], [rows, _]: Extent) -> [Tensor<4>; 3] {
        whole.map(|tensor| cut_rows(tensor, &rows))
    }

    fn shaders() -> &'static [Shader] {
        &[APPEND]
    }

    fn cases() -> Vec<Case<Self>> {
        cases::dense::appending()
    }
}
