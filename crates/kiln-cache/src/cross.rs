//! Encoder keys and values, written once.

use burn::tensor::{Device, Tensor};
use kiln_core::{
    Error, Result,
    layer::{CacheLayer, CrossLayer, LayerState},
    slot::{AnySlot, Slot, Touched},
    view::KvView,
};

use crate::restored;

#[derive(Clone, Debug, Default)]
pub(crate) struct WriteOnceLayer {
    kv: Slot<(Tensor<4>, Tensor<4>)>,
    frames: usize,
}

impl CrossLayer for WriteOnceLayer {
    fn snapshot(&self) -> Box<dyn CrossLayer> {
        Box::new(self.clone())
    }

    fn view(&mut self) -> Result<Option<KvView>> {
        Ok(self.kv.get()?.cloned().map(|(keys, values)| KvView::from_zero(keys, values)))
    }

    fn fill(&mut self, keys: Tensor<4>, values: Tensor<4>) -> Result<()> {
        if self.kv.get()?.is_some() {
            return Err(Error::AlreadyConditioned);
        }
        self.frames = keys.dims()[2];
        self.kv = Slot::Here((keys, values));
        Ok(())
    }
}

impl CacheLayer for WriteOnceLayer {
    fn name(&self) -> &'static str {
        "encoder"
    }

    fn seq_len(&self) -> usize {
        self.frames
    }

    /// Decoded tokens leave no trace here.
    fn can_roll_back(&self, _n: usize) -> bool {
        true
    }

    fn roll_back(&mut self, _n: usize) -> Result<()> {
        Ok(())
    }

    fn keep_history(&mut self, _n: usize) {}

    fn reset(&mut self) {
        *self = Self::default();
    }

    fn counts(&self) -> Vec<usize> {
        vec![self.frames]
    }

    fn restore(&mut self, state: LayerState, device: &Device) -> Result<()> {
        let ([frames], [kv]) = restored::parts(state)?;
        self.kv.restore(kv, device)?;
        self.frames = frames;
        Ok(())
    }

    /// It is written once, where there was nothing.
    fn touched(&mut self) -> Vec<Touched> {
        vec![Touched::Nothing]
    }

    fn slots(&self) -> Vec<&dyn AnySlot> {
        vec![&self.kv]
    }

    fn slots_mut(&mut self) -> Vec<&mut dyn AnySlot> {
        vec![&mut self.kv]
    }
}
