//! Encoder keys and values, written once.

use burn::tensor::Tensor;
use kiln_core::{
    Error, Result,
    layer::{CrossLayer, Kv, Parents, Reorders},
    slot::Slot,
    view::KvView,
};

use super::{Memory, Policy, Progress, check};

/// `seq_len` counts the encoder's frames. Decoded tokens leave no trace.
#[derive(Clone, Debug)]
pub(crate) struct WriteOnce;

impl Policy for WriteOnce {
    const NAME: &'static str = "encoder";
    type Counts = ();
    type Tensors = Slot<Kv>;

    fn rewind_point(&self, _at: &Progress<()>, _at_most: usize) -> Option<usize> {
        None
    }

    /// Rows of a prompt have the same.
    fn reorders(&self, _: &Slot<Kv>) -> Reorders {
        Reorders::InPlace
    }

    fn reorder_on_device(&self, _: &mut Slot<Kv>, _: &Parents) -> Result<()> {
        Ok(())
    }

    fn validate(&self, at: &Progress<()>, kv: &Slot<Kv>) -> Result<()> {
        check(kv.tokens() == at.seq_len)
    }
}

impl CrossLayer for Memory<WriteOnce> {
    fn view(&mut self) -> Result<Option<KvView>> {
        self.on_device(|_, _, kv| {
            Ok(kv.get()?.cloned().map(|(keys, values)| KvView::from_zero(keys, values)))
        })
    }

    fn fill(&mut self, keys: Tensor<4>, values: Tensor<4>) -> Result<()> {
        if self.at.seq_len > 0 {
            return Err(Error::AlreadyConditioned);
        }
        self.on_device(|_, at, kv| {
            at.seq_len = keys.dims()[2];
            kv.set((keys, values));
            Ok(())
        })
    }

    fn snapshot(&self) -> Box<dyn CrossLayer> {
        Box::new(self.clone())
    }
}
