//! A model whose logits are a hash of every token that it sees.

use std::sync::{Arc, Mutex};

use burn::tensor::{Device, Tensor, TensorData};
use kiln_core::{
    Error, Result,
    batch::Batch,
    layer::Positions,
    model::{CausalModel, Logits, TokenId},
    model_cache::Pass,
    need::{AttentionNeed, LayerNeed},
    read_back,
    view::KvView,
};

pub(crate) const VOCAB: usize = 23;

pub(crate) fn device() -> Device {
    Device::flex()
}

/// Logits after `ids`. There are few different ones, so that the likeliest often has equals.
pub(crate) fn logits(ids: &[TokenId]) -> Vec<f32> {
    let mut hash = ids.iter().fold(0xcbf2_9ce4_8422_2325u64, |hash, &id| {
        (hash ^ u64::from(id + 1)).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(23)
    });
    let mut next = || {
        hash = hash.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (hash >> 60) as f32 - 6.0
    };
    (0..VOCAB).map(|_| next()).collect()
}

/// Logits of an early layer after `ids`.
pub(crate) fn early(ids: &[TokenId], layer: usize) -> Vec<f32> {
    logits(&[ids, &[(VOCAB + layer) as TokenId]].concat())
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Hashing {
    /// The forward pass that fails, counted from 0.
    pub(crate) fails_at: Option<usize>,
    /// Tokens and horizon of every forward pass.
    pub(crate) fed: Arc<Mutex<Vec<(usize, usize)>>>,
}

impl Hashing {
    /// The model as a generation holds it. Passes of all of them are noted here.
    pub(crate) fn shared(&self) -> Arc<dyn CausalModel> {
        Arc::new(self.clone())
    }

    pub(crate) fn fed(&self) -> Vec<(usize, usize)> {
        self.fed.lock().unwrap().clone()
    }
}

impl CausalModel for Hashing {
    fn needs(&self) -> Vec<LayerNeed> {
        vec![AttentionNeed::alike(1, 1).into()]
    }

    fn vocab(&self) -> usize {
        VOCAB
    }

    fn head(&self, hidden: Tensor<3>) -> Tensor<3> {
        hidden
    }

    fn compute(&self, batch: &Batch, which: Logits<'_>, pass: &mut Pass<'_>) -> Result<Tensor<3>> {
        let mut fed = self.fed.lock().unwrap();
        if self.fails_at == Some(fed.len()) {
            fed.push((batch.len(), 0));
            return Err(Error::Execution("as asked".into()));
        }
        fed.push((batch.len(), batch.horizon.first().copied().unwrap_or(0)));
        let (rows, device) = (batch.rows(), batch.tokens.device());
        let tokens: Vec<f32> = read_back::read(batch.tokens.clone())?.iter::<f32>().collect();
        assert!(tokens.iter().all(|&id| id < VOCAB as f32), "{tokens:?}");
        let columns = batch.len();
        let mut all = vec![0.0; rows * columns * VOCAB];
        let mut last = vec![Vec::new(); rows];
        for part in pass.attention(0)? {
            let new = columns - part.skip;
            if new == 0 {
                continue;
            }
            let fed: Vec<f32> = part
                .rows
                .clone()
                .flat_map(|row| &tokens[row * columns + part.skip..(row + 1) * columns])
                .copied()
                .collect();
            let keys = Tensor::from_data(TensorData::new(fed, [part.rows.len(), 1, new, 1]), &device);
            let span = part.layer.span(new);
            let left_pad = &batch.left_pad[part.rows.clone()];
            let positions = Positions::even(span.query(new), left_pad, &device);
            let KvView::Dense(view) = part.layer.update(keys.clone(), keys, &positions)? else {
                return Err(Error::Execution("these layers are dense".to_owned()));
            };
            let (keys, _) = view.in_order(span);
            let len = keys.dims()[2];
            let keys: Vec<TokenId> = read_back::read(keys)?.iter::<f32>().map(|id| id as TokenId).collect();
            for ((row, ids), &pad) in part.rows.zip(keys.chunks(len)).zip(left_pad) {
                for column in part.skip..columns {
                    let seen = len - (columns - 1 - column);
                    let place = (row * columns + column) * VOCAB;
                    all[place..place + VOCAB].copy_from_slice(&logits(&ids[pad.min(seen)..seen]));
                    last[row] = ids[pad.min(seen)..seen].to_vec();
                }
            }
        }
        let all = Tensor::<3>::from_data(TensorData::new(all, [rows, columns, VOCAB]), &device);
        Ok(match which {
            Logits::Last => all.narrow(1, columns - 1, 1),
            // The head does nothing.
            Logits::All | Logits::Hidden => all,
            Logits::Alignment(_) => return Err(Error::Execution("there is no encoder".to_owned())),
            Logits::Early(layers) => {
                let of_row = |ids: &Vec<TokenId>| {
                    let early: Vec<f32> = layers.iter().flat_map(|&layer| early(ids, layer)).collect();
                    [early, logits(ids)].concat()
                };
                let all: Vec<f32> = last.iter().flat_map(of_row).collect();
                Tensor::from_data(TensorData::new(all, [rows, layers.len() + 1, VOCAB]), &device)
            }
        })
    }
}

pub(crate) mod cache {
    use burn::tensor::Tensor;
    use kiln_cache::memory::{KvPolicy, Memory, Policy, Progress};
    use kiln_core::{
        Result,
        layer::{Kv, Positions},
        model_cache::{LayerCache, ModelCache},
        slot::Slot,
        view::KvView,
    };

    pub(crate) fn keeps() -> ModelCache {
        cache(Fake { remembers: true, truncates: true })
    }

    pub(crate) fn cannot_truncate() -> ModelCache {
        cache(Fake { remembers: true, truncates: false })
    }

    pub(crate) fn forgets() -> ModelCache {
        cache(Fake { remembers: false, truncates: false })
    }

    fn cache(policy: Fake) -> ModelCache {
        let layer = Memory::new(policy, &super::device());
        ModelCache::new(vec![LayerCache { keys: Some(Box::new(layer)), ..LayerCache::default() }])
    }

    /// Truncates no further than was promised.
    #[derive(Clone, Debug)]
    struct Fake {
        remembers: bool,
        truncates: bool,
    }

    impl Policy for Fake {
        const NAME: &'static str = "fake";
        type Counts = ();
        type Tensors = Slot<Kv>;

        fn rewind_point(&self, at: &Progress<()>, at_most: usize) -> Option<usize> {
            let back = at.seq_len - at_most;
            (back == 0 || self.truncates && back <= at.history).then_some(at_most)
        }

        fn can_rewind(&self) -> bool {
            self.truncates
        }

        fn rewind(&self, _: &mut Progress<()>, kv: &mut Slot<Kv>, len: usize) -> Result<()> {
            if let Some((keys, values)) = kv.take()? {
                kv.set((keys.narrow(2, 0, len), values.narrow(2, 0, len)));
            }
            Ok(())
        }

        fn validate(&self, _: &Progress<()>, _: &Slot<Kv>) -> Result<()> {
            Ok(())
        }
    }

    impl KvPolicy for Fake {
        fn append(&self, _: &mut Progress<()>, kv: &mut Slot<Kv>, new: Kv, _: &Positions) -> Result<KvView> {
            let (keys, values) = match kv.take()? {
                Some((k, v)) => (Tensor::cat(vec![k, new.0], 2), Tensor::cat(vec![v, new.1], 2)),
                None => new,
            };
            if self.remembers {
                kv.set((keys.clone(), values.clone()));
            }
            Ok(KvView::from_zero(keys, values))
        }

        fn advance(&self, at: &mut Progress<()>, _: &Slot<Kv>, n: usize) {
            at.seq_len += if self.remembers { n } else { 0 };
        }

        fn gather(&self, _: &Progress<()>, kv: &Slot<Kv>) -> Result<Option<Kv>> {
            Ok(kv.get()?.cloned())
        }
    }
}
