//! Encoder keys and values, written once.

use burn::tensor::Tensor;
use kiln_core::{
    Error, Result,
    layer::{CrossLayer, Kv, Parents, Positions, Reorders},
    need::{AttentionNeed, Stream},
    slot::Slot,
    view::KvView,
};

use super::{KvPolicy, Memory, Policy, Progress, check};

/// Policy of an encoder's keys and values. `seq_len` counts the encoder's frames; decoded tokens leave no
/// trace.
#[derive(Clone, Debug)]
pub(crate) struct WriteOnce {
    pub(crate) need: AttentionNeed,
}

impl WriteOnce {
    /// Whether keys and values have the shape of this block.
    fn fits(&self, (keys, values): &Kv) -> bool {
        let [rows, _, positions, _] = keys.dims();
        let streams = self.need.streams().map(|stream| stream.shape(rows, positions));
        [keys.dims(), values.dims()] == streams
    }
}

impl Policy for WriteOnce {
    const NAME: &'static str = "encoder";
    type Counts = ();
    type Tensors = Slot<Kv>;

    fn rewind_point(&self, _at: &Progress<()>, _at_most: usize) -> Option<usize> {
        None
    }

    /// Nothing moves: rows of the same prompt have the same encoder output.
    fn reorders(&self, _: &Slot<Kv>) -> Reorders {
        Reorders::InPlace
    }

    fn reorder_on_device(&self, _: &mut Slot<Kv>, _: &Parents) -> Result<()> {
        Ok(())
    }

    fn validate(&self, at: &Progress<()>, kv: &Slot<Kv>) -> Result<()> {
        check(kv.tokens() == at.seq_len)?;
        check(kv.get()?.is_none_or(|kv| self.fits(kv)))
    }
}

impl CrossLayer for Memory<WriteOnce> {
    fn gather(&self) -> Result<Option<Kv>> {
        Ok(self.copied()?.get()?.cloned())
    }

    fn view(&mut self) -> Result<Option<KvView>> {
        self.on_device(|_, _, kv| {
            Ok(kv.get()?.cloned().map(|(keys, values)| KvView::from_zero(keys, values)))
        })
    }

    fn fill(&mut self, keys: Tensor<4>, values: Tensor<4>) -> Result<()> {
        if self.at.seq_len > 0 {
            return Err(Error::AlreadyConditioned);
        }
        self.on_device(|policy, at, kv| {
            if !policy.fits(&(keys.clone(), values.clone())) {
                return Err(of_another_block(&keys, &values));
            }
            at.seq_len = keys.dims()[2];
            kv.set((keys, values));
            Ok(())
        })
    }

    fn snapshot(&self) -> Box<dyn CrossLayer> {
        Box::new(self.clone())
    }
}

fn of_another_block(keys: &Tensor<4>, values: &Tensor<4>) -> Error {
    let why = format!("keys {:?} and values {:?} are of another block", keys.dims(), values.dims());
    Error::Import { why }
}

/// A strategy for the keys and values of a sequence that can also hold those of an encoder, which are all
/// written at once.
pub(crate) trait EncoderPolicy: KvPolicy {
    /// Returns everything that was written.
    fn stored(&self, at: &Progress<Self::Counts>, tensors: &mut Self::Tensors) -> Result<KvView>;
}

/// An encoder's keys and values, held by another strategy. `seq_len` counts the encoder's frames.
#[derive(Clone, Debug)]
pub(crate) struct Once<P>(pub(crate) P);

impl<P: EncoderPolicy> Policy for Once<P> {
    const NAME: &'static str = P::NAME;
    type Counts = P::Counts;
    type Tensors = P::Tensors;

    fn empty(&self, counts: &P::Counts) -> P::Tensors {
        self.0.empty(counts)
    }

    fn rewind_point(&self, _: &Progress<P::Counts>, _at_most: usize) -> Option<usize> {
        None
    }

    /// Nothing moves: rows of the same prompt have the same encoder output.
    fn reorders(&self, _: &P::Tensors) -> Reorders {
        Reorders::InPlace
    }

    fn reorder_on_device(&self, _: &mut P::Tensors, _: &Parents) -> Result<()> {
        Ok(())
    }

    fn trim(&self, at: &mut Progress<P::Counts>, tensors: &mut P::Tensors) -> Result<()> {
        self.0.trim(at, tensors)
    }

    fn validate(&self, at: &Progress<P::Counts>, tensors: &P::Tensors) -> Result<()> {
        self.0.validate(at, tensors)
    }
}

impl<P: EncoderPolicy> CrossLayer for Memory<Once<P>> {
    fn gather(&self) -> Result<Option<Kv>> {
        self.policy.0.gather(&self.at, &self.copied()?)
    }

    fn view(&mut self) -> Result<Option<KvView>> {
        if self.at.seq_len == 0 {
            return Ok(None);
        }
        self.on_device(|policy, at, tensors| policy.0.stored(at, tensors).map(Some))
    }

    fn fill(&mut self, keys: Tensor<4>, values: Tensor<4>) -> Result<()> {
        if self.at.seq_len > 0 {
            return Err(Error::AlreadyConditioned);
        }
        self.on_device(|policy, at, tensors| {
            let [rows, _, frames, _] = keys.dims();
            let of = |[k, v]: [Stream; 2]| {
                [keys.dims(), values.dims()] == [k, v].map(|one| one.shape(rows, frames))
            };
            if !policy.0.streams().is_none_or(of) {
                return Err(of_another_block(&keys, &values));
            }
            let positions = Positions::all_at(0, rows, &keys.device());
            policy.0.append(at, tensors, (keys, values), &positions)?;
            policy.0.advance(at, tensors, frames);
            Ok(())
        })
    }

    fn snapshot(&self) -> Box<dyn CrossLayer> {
        Box::new(self.clone())
    }
}
