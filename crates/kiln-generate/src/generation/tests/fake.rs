//! A model whose logits are a hash of every token that it sees.

use std::sync::Mutex;

use burn::tensor::{Device, Tensor, TensorData};
use kiln_core::{
    Error, Result,
    batch::Batch,
    layer::Place,
    model::{CausalModel, Logits, TokenId},
    model_cache::ModelCache,
    need::{AttentionNeed, LayerNeed},
    read_back,
    view::KvView,
};

pub(super) const VOCAB: usize = 23;

pub(super) fn device() -> Device {
    Device::flex()
}

/// Logits after `ids`. There are few different ones, so that the likeliest often has equals.
pub(super) fn logits(ids: &[TokenId]) -> Vec<f32> {
    let mut hash = ids.iter().fold(0xcbf2_9ce4_8422_2325u64, |hash, &id| {
        (hash ^ u64::from(id + 1)).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(23)
    });
    let mut next = || {
        hash = hash.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (hash >> 60) as f32 - 6.0
    };
    (0..VOCAB).map(|_| next()).collect()
}

#[derive(Debug, Default)]
pub(super) struct Hashing {
    /// The forward pass that fails, counted from 0.
    pub(super) fails_at: Option<usize>,
    /// Tokens and horizon of every forward pass.
    pub(super) fed: Mutex<Vec<(usize, usize)>>,
}

impl Hashing {
    pub(super) fn fed(&self) -> Vec<(usize, usize)> {
        self.fed.lock().unwrap().clone()
    }
}

impl CausalModel for Hashing {
    fn needs(&self) -> Vec<LayerNeed> {
        vec![LayerNeed::Attention(AttentionNeed { kv_heads: 1, head_dim: 1, window: None, rotary: None })]
    }

    fn vocab(&self) -> usize {
        VOCAB
    }

    fn compute(&self, batch: &Batch, which: Logits, cache: &mut ModelCache) -> Result<Tensor<3>> {
        assert_eq!(which, Logits::Last);
        let mut fed = self.fed.lock().unwrap();
        if self.fails_at == Some(fed.len()) {
            return Err(Error::Execution("as asked".into()));
        }
        fed.push((batch.len(), batch.horizon));
        let (rows, device) = (batch.rows(), batch.tokens.device());
        let tokens: Vec<f32> = read_back::read(batch.tokens.clone())?.iter::<f32>().collect();
        assert!(tokens.iter().all(|&id| id < VOCAB as f32), "{tokens:?}");
        let keys = Tensor::from_data(TensorData::new(tokens, [rows, 1, batch.len(), 1]), &device);
        let layer = cache.attention(0)?;
        let span = layer.span(batch.len());
        let place = Place::new(span.query(batch.len()), &batch.left_pad, &device);
        let KvView::Dense(view) = layer.update(keys.clone(), keys, &place)? else {
            return Err(Error::Execution("these layers are dense".to_owned()));
        };
        let (keys, _) = view.in_order(span);
        let len = keys.dims()[2];
        let keys: Vec<TokenId> = read_back::read(keys)?.iter::<f32>().map(|id| id as TokenId).collect();
        let rows_logits =
            keys.chunks(len).zip(&batch.left_pad).flat_map(|(ids, &pad)| logits(&ids[pad.min(len)..]));
        Ok(Tensor::from_data(TensorData::new(rows_logits.collect::<Vec<_>>(), [rows, 1, VOCAB]), &device))
    }
}

pub(super) mod cache {
    use burn::tensor::{Device, Tensor};
    use kiln_core::{
        Error, Result,
        layer::{CacheLayer, KvLayer, KvSpan, LayerState, Place},
        model_cache::{LayerCache, ModelCache},
        slot::{AnySlot, Slot},
        view::KvView,
    };

    pub(in super::super) fn keeps() -> ModelCache {
        cache(Layer { remembers: true, rolls_back: true, ..Layer::default() })
    }

    pub(in super::super) fn cannot_roll_back() -> ModelCache {
        cache(Layer { remembers: true, ..Layer::default() })
    }

    pub(in super::super) fn forgets() -> ModelCache {
        cache(Layer::default())
    }

    fn cache(layer: Layer) -> ModelCache {
        ModelCache::new(vec![LayerCache::Attention(Box::new(layer))])
    }

    /// Rolls back no further than it was asked to keep.
    #[derive(Clone, Debug, Default)]
    struct Layer {
        remembers: bool,
        rolls_back: bool,
        history: usize,
        kv: Slot<(Tensor<4>, Tensor<4>)>,
    }

    impl KvLayer for Layer {
        fn span(&self, n: usize) -> KvSpan {
            KvSpan { start: 0, len: self.seq_len() + n }
        }

        fn update(&mut self, keys: Tensor<4>, values: Tensor<4>, _place: &Place) -> Result<KvView> {
            let (keys, values) = match self.kv.take()? {
                Some((k, v)) => (Tensor::cat(vec![k, keys], 2), Tensor::cat(vec![v, values], 2)),
                None => (keys, values),
            };
            if self.remembers {
                self.kv = Slot::Here((keys.clone(), values.clone()));
            }
            Ok(KvView::from_zero(keys, values))
        }

        fn dense(&self) -> Result<Option<(Tensor<4>, Tensor<4>)>> {
            Ok(self.kv.get()?.cloned())
        }

        fn snapshot(&self) -> Box<dyn KvLayer> {
            Box::new(self.clone())
        }
    }

    impl CacheLayer for Layer {
        fn name(&self) -> &'static str {
            "fake"
        }

        fn seq_len(&self) -> usize {
            self.kv.get().ok().flatten().map_or(0, |(keys, _)| keys.dims()[2])
        }

        fn can_roll_back(&self, n: usize) -> bool {
            n == 0 || self.rolls_back && n <= self.history
        }

        fn roll_back(&mut self, n: usize) -> Result<()> {
            if !self.can_roll_back(n) {
                return Err(Error::CannotRollBack { layer: self.name(), tokens: n });
            }
            let len = self.seq_len() - n;
            if let Some((keys, values)) = self.kv.take()? {
                self.kv = Slot::Here((keys.narrow(2, 0, len), values.narrow(2, 0, len)));
            }
            Ok(())
        }

        fn keep_history(&mut self, n: usize) {
            self.history = n;
        }

        fn reset(&mut self) {
            self.kv = Slot::Empty;
        }

        fn counts(&self) -> Vec<usize> {
            Vec::new()
        }

        fn restore(&mut self, state: LayerState, device: &Device) -> Result<()> {
            let _ = (state, device);
            Err(Error::Import { why: "never asked".into() })
        }

        fn slots(&self) -> Vec<&dyn AnySlot> {
            vec![&self.kv]
        }

        fn slots_mut(&mut self) -> Vec<&mut dyn AnySlot> {
            vec![&mut self.kv]
        }
    }
}
