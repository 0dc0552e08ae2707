//! Unpacks keys or values: `code * scale + offset`, in float32, then rounded to the type of the result.

use std::ops::Range;

use burn::tensor::{DType, FloatDType, Int, Tensor};
use kiln_core::packed::{Along, PackedBuffer, Packing};

use crate::{
    cache::kv_pack::{OPTIONS, fits, spread},
    runtime::{
        half,
        kernel::Kernel,
        shader::{Shader, reads, writes},
    },
    testing::{
        case::{Case, LARGEST, Rounding},
        checked::Checked,
        cut::{Extent, cut_buffer, cut_rows},
    },
};

/// Unpacks some slots of a buffer, in order: `[batch, kv_heads, slots, head_dim]`.
#[derive(Clone, Debug)]
pub struct KvUnpack {
    pub buffer: PackedBuffer,
    pub packing: Packing,
    pub head_dim: usize,
    pub slots: Range<usize>,
    /// The type of the result.
    pub dtype: FloatDType,
}

impl Kernel for KvUnpack {
    const NAME: &'static str = "kv_unpack";
    type Output = Tensor<4>;

    fn checked(self) -> Self {
        let Self { buffer, packing, head_dim, slots, .. } = &self;
        let [batch, heads, all, _] = buffer.codes.dims();
        fits(Self::NAME, buffer, *packing, [batch, heads, all, *head_dim]);
        assert!(slots.start <= slots.end && slots.end <= all, "kv_unpack: slots {slots:?} of {all}");
        self
    }

    fn shape(&self) -> Vec<usize> {
        let [batch, heads, _, _] = self.buffer.codes.dims();
        vec![batch, heads, self.slots.len(), self.head_dim]
    }

    fn reference(self) -> Tensor<4> {
        let Self { buffer, packing, head_dim, slots, dtype } = self;
        let [batch, heads, _, words] = buffer.codes.dims();
        let shape = [batch, heads, slots.len(), head_dim];
        if shape.contains(&0) {
            return Tensor::<4>::zeros(shape, &buffer.codes.device()).cast(dtype);
        }
        // Whole groups first, then the requested part of them.
        let together = packing.slots_together();
        let groups = slots.start / together..slots.end.div_ceil(together);
        let n = groups.len() * together;
        let codes = buffer.codes.clone().narrow(2, groups.start * together, n);
        let scales = buffer.scales.clone().narrow(2, groups.start, groups.len());

        let (channels, each) = (packing.channels_together(head_dim), packing.codes_a_word());
        let parts = (0..each).map(|i| {
            let code = codes.clone().bitwise_right_shift_scalar((i * packing.bits()) as i32);
            code.bitwise_and_scalar(packing.largest() as i32).unsqueeze_dim::<5>(4)
        });
        let all: Tensor<4, Int> = Tensor::cat(parts.collect(), 4).reshape([
            batch,
            heads,
            n * head_dim.div_ceil(channels),
            packing.words_together(head_dim) * each,
        ]);
        let codes: Tensor<4, Int> = all.narrow(3, 0, channels).reshape([
            batch,
            heads,
            n,
            words / packing.words_together(head_dim) * channels,
        ]);
        let codes = codes.narrow(3, 0, head_dim).float().cast(DType::F32);

        let dims = [batch, heads, n, head_dim];
        let scale = spread(half::numbers(scales.clone()), packing, dims);
        let offset = spread(half::numbers(scales.bitwise_right_shift_scalar(16)), packing, dims);
        let numbers = codes * scale + offset;
        numbers.narrow(2, slots.start - groups.start * together, slots.len()).cast(dtype)
    }

    #[cfg(feature = "wgpu")]
    fn wgsl(self) -> Result<Tensor<4>, Self> {
        use burn::backend::Cube;

        use crate::{
            cache::kv_pack::picks,
            runtime::launch::{LANES, Launch, empty, primitive, strides},
            shaders::kv_unpack::Info,
        };

        let Self { buffer, packing, head_dim, slots, dtype } = self;
        let [batch, heads, _, _] = buffer.codes.dims();
        let shape = [batch, heads, slots.len(), head_dim];
        let (codes, scales) = (primitive(buffer.codes), primitive(buffer.scales));
        let y = empty(&codes, shape, dtype.into());
        let invocations: usize = shape.iter().product();
        let info = Info {
            code_strides: strides(&codes),
            scale_strides: strides(&scales),
            heads: heads as u32,
            tokens: slots.len() as u32,
            slot: slots.start as u32,
            head_dim: head_dim as u32,
            group: packing.group() as u32,
            channels_together: packing.channels_together(head_dim) as u32,
            words_together: packing.words_together(head_dim) as u32,
            invocations: invocations as u32,
        };
        let launch = Launch::new(&SHADER, y.dtype, &y.client).with(&picks(packing));
        launch.run(invocations.div_ceil(LANES), [&codes, &scales, &y], info);
        Ok(Tensor::from_primitive::<Cube>(y))
    }

    #[cfg(feature = "cube")]
    fn cube(self) -> Result<Tensor<4>, Self> {
        Ok(cube::launch(self))
    }
}

impl Checked for KvUnpack {
    fn extent(&self) -> [usize; 2] {
        [self.buffer.codes.dims()[0], 1]
    }

    fn part(self, [rows, _]: Extent) -> Self {
        Self { buffer: cut_buffer(self.buffer, &rows), ..self }
    }

    fn part_of(whole: Tensor<4>, [rows, _]: Extent) -> Tensor<4> {
        cut_rows(whole, &rows)
    }

    fn shaders() -> &'static [Shader] {
        &[SHADER]
    }

    fn cases() -> Vec<Case<Self>> {
        let case = |shape: [usize; 4], (bits, group, along): (usize, usize, Along), slots: Range<usize>| {
            Packing::new(bits, group, along).ok().map(|packing| {
                let case = Case::new((shape, packing, slots.clone()), move |numbers| {
                    let buffer = numbers.packed(shape, packing);
                    let (slots, dtype) = (slots.clone(), numbers.float_dtype());
                    Self { buffer, packing, head_dim: shape[3], slots, dtype }
                });
                // A product and a sum, which devices may contract.
                case.without_native()
                    .within(|want, Rounding { single, ulp, .. }| LARGEST * single + want.abs() * ulp)
            })
        };
        let mut cases = Vec::new();
        for bits in Packing::BITS {
            for along in [Along::Channels, Along::Tokens] {
                cases.push(case([2, 2, 64, 64], (bits, 32, along), 0..64));
                cases.push(case([1, 3, 48, 80], (bits, 24, along), 3..47));
                cases.push(case([1, 1, 16, 12], (bits, 8, along), 5..5));
            }
        }
        cases.into_iter().flatten().collect()
    }
}

const SHADER: Shader = Shader {
    name: "kv_unpack",
    bindings: &[reads("codes"), reads("scales"), writes("y")],
    text: include_str!("../../../../shaders/kv_unpack.wgsl"),
    options: OPTIONS,
};

#[cfg(feature = "cube")]
mod cube {
    use burn::{
        backend::{Cube, cubecl::dtype_to_storage_type},
        tensor::Tensor as BurnTensor,
    };
    use cubecl::prelude::*;
    use kiln_core::packed::Along;

    use super::KvUnpack;
    use crate::runtime::{
        half::half_number,
        launch::{LANES, address_type, count, empty, primitive},
    };

    #[cube(launch, address_type = "dynamic")]
    fn kv_unpack<E: Numeric>(
        codes: &Tensor<u32>,
        scales: &Tensor<u32>,
        y: &mut Tensor<E>,
        first: usize,
        group: usize,
        channels_together: usize,
        words_together: usize,
        invocations: usize,
        #[comptime] along_tokens: bool,
        #[comptime] bits: u32,
        #[define(E)] _elem: ElemType,
    ) {
        if ABSOLUTE_POS >= invocations {
            terminate!();
        }
        let (heads, tokens, head_dim) = (y.shape(1), y.shape(2), y.shape(3));
        let channel = ABSOLUTE_POS % head_dim;
        let slot = first + ABSOLUTE_POS / head_dim % tokens;
        let head = ABSOLUTE_POS / head_dim / tokens % heads;
        let batch = ABSOLUTE_POS / head_dim / tokens / heads;

        let together = channel / channels_together;
        let i = channel % channels_together;
        let each = comptime!((32 / bits) as usize);
        let word = codes[batch * codes.stride(0)
            + head * codes.stride(1)
            + slot * codes.stride(2)
            + (together * words_together + i / each) * codes.stride(3)];
        let code = (word >> (u32::cast_from(i % each) * bits)) & comptime!((1u32 << bits) - 1);
        let groups = batch * scales.stride(0) + head * scales.stride(1);
        let mut at = groups + slot * scales.stride(2) + together * scales.stride(3);
        if comptime!(along_tokens) {
            at = groups + slot / group * scales.stride(2) + channel * scales.stride(3);
        }
        let scale = scales[at];
        let number = f32::cast_from(code) * half_number(scale & 0xffffu32) + half_number(scale >> 16u32);
        y[ABSOLUTE_POS] = E::cast_from(number);
    }

    pub(super) fn launch(KvUnpack { buffer, packing, head_dim, slots, dtype }: KvUnpack) -> BurnTensor<4> {
        let [batch, heads, _, _] = buffer.codes.dims();
        let shape = [batch, heads, slots.len(), head_dim];
        let (codes, scales) = (primitive(buffer.codes), primitive(buffer.scales));
        let y = empty(&codes, shape, dtype.into());
        let invocations: usize = shape.iter().product();
        kv_unpack::launch(
            &y.client,
            count(invocations.div_ceil(LANES)),
            CubeDim::new_1d(LANES as u32),
            address_type([&codes, &scales, &y]),
            codes.into_tensor_arg(),
            scales.into_tensor_arg(),
            y.clone().into_tensor_arg(),
            slots.start,
            packing.group(),
            packing.channels_together(head_dim),
            packing.words_together(head_dim),
            invocations,
            packing.along() == Along::Tokens,
            packing.bits() as u32,
            dtype_to_storage_type(y.dtype),
        );
        BurnTensor::from_primitive::<Cube>(y)
    }
}
