//! The rule of `format=fp8` (`Fp8QuantizedLayer` of transformers): the first pass decides the scales, and
//! every token is rounded once, when it is stored. The queries of the first pass see its keys and values as
//! they are; those of later passes see all, including their own, rounded.

use burn::tensor::{DType, Int, Tensor};
use kiln_core::{
    Result, gapless,
    layer::{Footprint, Kv, Limits, Positions, StepShape},
    need::{AttentionNeed, Stream},
    slot::Slot,
    view::KvView,
};
use kiln_kernels::{Float8Unpack, Kernels};
use serde::{Deserialize, Serialize};

use crate::{
    memory::{KvPolicy, Policy, Progress, check, tensor_tree},
    quantizers::fp8,
};

/// Bytes per number of the codes while they are unpacked.
const UNPACKED: usize = 8;

/// Returns the number of bytes for `tokens` tokens of one row, of keys and of values.
pub(super) fn bytes(need: &AttentionNeed, tokens: usize) -> [usize; 2] {
    need.streams()
        .map(|stream| tokens.saturating_mul(stream.heads * fp8::words(stream.width) * size_of::<u32>()))
}

#[derive(Clone, Debug)]
pub(super) struct Float8Policy {
    pub(super) need: AttentionNeed,
    pub(super) kernels: Kernels,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Counts {
    /// Number of tokens in the pass that decided the scales.
    first: usize,
}

#[derive(Clone, Debug, Default)]
pub(super) struct Tensors {
    /// Codes of keys and of values, `[rows, heads, slots, words]`. Position `p` is in slot `p`.
    codes: Slot<(Tensor<4, Int>, Tensor<4, Int>)>,
    /// Scales of keys and of values, `[rows, 1]`.
    scales: Slot<(Tensor<2>, Tensor<2>)>,
}

tensor_tree!(Tensors { codes, scales });

type At = Progress<Counts>;

impl Float8Policy {
    /// Number of slots once there are `end` tokens; `have`: current number.
    fn slots_for(&self, at: &At, have: usize, end: usize) -> usize {
        // Growth by an eighth makes copies rare, and leaves little memory unused. If the final length is
        // known (`horizon`), all is allocated at once.
        if end <= have { have } else { end.max(at.horizon).max(have + have / 8) }
    }

    /// Returns keys and values of the first `len` tokens.
    fn unpacked(&self, tensors: &Tensors, len: usize, dtype: DType) -> Result<Option<Kv>> {
        let Some(((keys, values), (of_keys, of_values))) =
            tensors.codes.get()?.cloned().zip(tensors.scales.get()?.cloned())
        else {
            return Ok(None);
        };
        let unpack = |codes: Tensor<4, Int>, scales, stream: Stream| {
            let (codes, width) = (codes.narrow(2, 0, len), stream.width);
            self.kernels.run(Float8Unpack { codes, scales, width, dtype: dtype.into() })
        };
        Ok(Some((unpack(keys, of_keys, self.need.keys), unpack(values, of_values, self.need.values))))
    }
}

impl Policy for Float8Policy {
    const NAME: &'static str = "quantized";
    type Counts = Counts;
    type Tensors = Tensors;

    /// In every pass the whole history also exists unpacked.
    fn footprint(&self, at: &At, tensors: &Tensors, step: &StepShape) -> Footprint {
        let end = at.seq_len + step.tokens;
        let slots = self.slots_for(at, tensors.codes.tokens(), end);
        let [keys, values] = bytes(&self.need, slots).map(|bytes| bytes.saturating_mul(step.rows));
        let of_token = self.need.token_bytes(step.element) + self.need.token_bytes(UNPACKED);
        let passing = of_token.saturating_mul(step.rows).saturating_mul(end);
        Footprint { held: keys.saturating_add(values), largest: keys.max(values), passing }
    }

    /// Fewer tokens than those of the first pass would have had other scales.
    fn rewind_point(&self, at: &At, at_most: usize) -> Option<usize> {
        (at.seq_len > 0 && at_most >= at.counts.first).then_some(at_most)
    }

    fn trim(&self, at: &mut At, tensors: &mut Tensors) -> Result<()> {
        if at.seq_len < tensors.codes.tokens()
            && let Some((keys, values)) = tensors.codes.take()?
        {
            tensors.codes.set((keys.narrow(2, 0, at.seq_len), values.narrow(2, 0, at.seq_len)));
        }
        Ok(())
    }

    fn validate(&self, at: &At, tensors: &Tensors) -> Result<()> {
        let (Some((keys, values)), Some((of_keys, of_values))) =
            (tensors.codes.get()?, tensors.scales.get()?)
        else {
            return check(
                at.seq_len == 0 && tensors.codes.get()?.is_none() && tensors.scales.get()?.is_none(),
            );
        };
        let [rows, _, slots, _] = keys.dims();
        let fits = |codes: &Tensor<4, Int>, scales: &Tensor<2>, Stream { heads, width }: Stream| {
            codes.dims() == [rows, heads, slots, fp8::words(width)]
                && codes.dtype() == DType::I32
                && (scales.dims(), scales.dtype()) == ([rows, 1], DType::F32)
        };
        check(fits(keys, of_keys, self.need.keys) && fits(values, of_values, self.need.values))?;
        check((1..=at.seq_len).contains(&at.counts.first) && at.seq_len <= slots)
    }
}

impl KvPolicy for Float8Policy {
    fn streams(&self) -> Option<[Stream; 2]> {
        Some(self.need.streams())
    }

    fn limits(&self, _: &At) -> Limits {
        Limits { by_pass: true, ..Limits::default() }
    }

    fn append(&self, at: &mut At, tensors: &mut Tensors, new: Kv, _: &Positions) -> Result<KvView> {
        let (rows, n) = (new.0.dims()[0], new.0.dims()[2]);
        let (first, end) = (at.seq_len, at.seq_len + n);
        let (of_keys, of_values) = match tensors.scales.get()?.cloned().filter(|_| first > 0) {
            Some(scales) => scales,
            None => {
                at.counts.first = n;
                let scales = (fp8::scales(&new.0), fp8::scales(&new.1));
                tensors.scales.set(scales.clone());
                scales
            }
        };
        let codes = (fp8::encode(new.0.clone(), &of_keys), fp8::encode(new.1.clone(), &of_values));
        let have = tensors.codes.tokens();
        let slots = self.slots_for(at, have, end);
        let old = tensors.codes.take()?.filter(|_| first > 0);
        let is_kept = old.is_some() && slots == have;
        let (old_keys, old_values) = old.unzip();
        let stored = |old: Option<Tensor<4, Int>>, new: Tensor<4, Int>| {
            let [_, heads, _, words] = new.dims();
            let buffer = match old {
                Some(old) if is_kept => old,
                old => {
                    let empty = gapless::zeros([rows, heads, slots, words], (&new.device(), new.dtype()));
                    match old {
                        Some(old) => {
                            let held = [0..rows, 0..heads, 0..first, 0..words];
                            empty.slice_assign(held, old.narrow(2, 0, first))
                        }
                        None => empty,
                    }
                }
            };
            buffer.slice_assign([0..rows, 0..heads, first..end, 0..words], new)
        };
        let codes = (stored(old_keys, codes.0), stored(old_values, codes.1));
        match is_kept {
            true => tensors.codes.set_written(codes, std::iter::once(first..end)),
            false => tensors.codes.set(codes),
        }
        if first == 0 {
            return Ok(KvView::from_zero(new.0, new.1));
        }
        let (keys, values) = self.unpacked(tensors, end, new.0.dtype())?.unwrap_or(new);
        Ok(KvView::from_zero(keys, values))
    }

    fn gather(&self, at: &At, tensors: &Tensors) -> Result<Option<Kv>> {
        match at.seq_len {
            0 => Ok(None),
            len => self.unpacked(tensors, len, DType::F32),
        }
    }
}
