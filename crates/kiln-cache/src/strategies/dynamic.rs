//! Keeps everything (transformers' `DynamicCache`).
//!
//! Keys live in a buffer that doubles when it is full, so that a step writes its own tokens in place and copies
//! nothing, and so that shapes repeat.

use burn::tensor::Tensor;
use kiln_core::{
    Error, Result,
    layer::{CacheLayer, KvLayer, KvSpan},
    need::AttentionNeed,
    slot::{AnySlot, Slot},
    view::KvView,
};

use super::KvStrategy;

/// Slots of the smallest buffer.
const SMALLEST: usize = 64;

#[derive(Debug)]
pub(super) struct Dynamic;

impl KvStrategy for Dynamic {
    fn name(&self) -> &'static str {
        "dynamic"
    }

    fn summary(&self) -> &'static str {
        "keeps every key and value"
    }

    fn bytes(&self, need: &AttentionNeed, tokens: usize, element: usize) -> usize {
        (2 * need.kv_heads * need.head_dim * element).saturating_mul(tokens)
    }

    fn build(&self, _need: &AttentionNeed) -> Result<Box<dyn KvLayer>> {
        Ok(Box::<DynamicLayer>::default())
    }
}

#[derive(Debug, Default)]
struct DynamicLayer {
    /// `[batch, kv_heads, capacity, head_dim]`, of which the first `seq_len` slots count.
    kv: Slot<(Tensor<4>, Tensor<4>)>,
    seq_len: usize,
}

impl KvLayer for DynamicLayer {
    fn span(&self, n: usize) -> KvSpan {
        KvSpan { start: 0, len: self.seq_len + n }
    }

    fn update(&mut self, keys: Tensor<4>, values: Tensor<4>) -> Result<KvView> {
        let (start, len) = (self.seq_len, self.seq_len + keys.dims()[2]);
        if let Some((stored, _)) = self.kv.get()?
            && self.seq_len > 0
            && stored.dims()[0] != keys.dims()[0]
        {
            return Err(Error::WrongRows { rows: stored.dims()[0], given: keys.dims()[0] });
        }
        let (keys, values) = match self.kv.take()? {
            Some((k, v)) if start > 0 => (append(k, keys, start), append(v, values, start)),
            // Room is allocated at the second update: a prompt that is only scored never needs it.
            _ => (keys, values),
        };
        self.seq_len = len;
        self.kv = Slot::Here((keys.clone(), values.clone()));
        Ok(KvView::Dense { keys: keys.narrow(2, 0, len), values: values.narrow(2, 0, len) })
    }
}

/// Writes `new` behind the first `len` slots of `buffer`; in place where there is room and no other owner.
fn append(buffer: Tensor<4>, new: Tensor<4>, len: usize) -> Tensor<4> {
    let [batch, heads, capacity, dim] = buffer.dims();
    let end = len + new.dims()[2];
    let buffer = if end <= capacity {
        buffer
    } else {
        let capacity = end.next_power_of_two().max(SMALLEST);
        let grown = Tensor::zeros([batch, heads, capacity, dim], (&buffer.device(), buffer.dtype()));
        grown.slice_assign([0..batch, 0..heads, 0..len, 0..dim], buffer.narrow(2, 0, len))
    };
    buffer.slice_assign([0..batch, 0..heads, len..end, 0..dim], new)
}

impl CacheLayer for DynamicLayer {
    fn name(&self) -> &'static str {
        "dynamic"
    }

    fn seq_len(&self) -> usize {
        self.seq_len
    }

    fn can_roll_back(&self, n: usize) -> bool {
        n <= self.seq_len
    }

    fn roll_back(&mut self, n: usize) -> Result<()> {
        if !self.can_roll_back(n) {
            return Err(Error::CannotRollBack { layer: self.name(), tokens: n });
        }
        self.seq_len -= n;
        Ok(())
    }

    fn keep_history(&mut self, _n: usize) {}

    fn reset(&mut self) {
        *self = Self::default();
    }

    fn compact(&mut self) {
        if self.seq_len == 0 {
            self.kv = Slot::Empty;
        }
        if let Slot::Here((k, v)) = &mut self.kv {
            k.inplace(|k| k.narrow(2, 0, self.seq_len));
            v.inplace(|v| v.narrow(2, 0, self.seq_len));
        }
    }

    fn slots(&self) -> Vec<&dyn AnySlot> {
        vec![&self.kv]
    }

    fn slots_mut(&mut self) -> Vec<&mut dyn AnySlot> {
        vec![&mut self.kv]
    }
}
