//! Memory of one block, of any kind.

use crate::{
    Result,
    layer::{CacheLayer, CrossLayer, KvLayer, Limits, StateLayer},
};

/// Memory of one block. The kind of memory matters to the model, hence an enum; the strategy does not, hence
/// boxes.
#[derive(Debug)]
pub enum LayerCache {
    Attention(Box<dyn KvLayer>),
    EncoderDecoder { decoder: Box<dyn KvLayer>, encoder: Box<dyn CrossLayer> },
    Recurrent(Box<dyn StateLayer>),
    Nothing,
}

impl LayerCache {
    /// Whether the layer is on the device only while it is used.
    pub fn is_offloaded(&self) -> bool {
        self.parts().any(CacheLayer::is_offloaded)
    }

    /// Moves the layer to host memory. From then on it is on the device only while it is used.
    pub fn offload(&mut self) -> Result<()> {
        self.parts_mut().try_for_each(|part| part.offload())
    }

    /// Copies the layer lazily: tensors are shared until either copy writes.
    pub(super) fn snapshot(&self) -> Self {
        match self {
            Self::Attention(kv) => Self::Attention(kv.snapshot()),
            Self::EncoderDecoder { decoder, encoder } => {
                Self::EncoderDecoder { decoder: decoder.snapshot(), encoder: encoder.snapshot() }
            }
            Self::Recurrent(state) => Self::Recurrent(state.snapshot()),
            Self::Nothing => Self::Nothing,
        }
    }

    /// Returns the layer of the block's own keys and values.
    pub(super) fn keys(&self) -> Option<&dyn KvLayer> {
        match self {
            Self::Attention(kv) | Self::EncoderDecoder { decoder: kv, .. } => Some(&**kv),
            Self::Recurrent(_) | Self::Nothing => None,
        }
    }

    pub(super) fn keys_mut(&mut self) -> Option<&mut dyn KvLayer> {
        match self {
            Self::Attention(kv) | Self::EncoderDecoder { decoder: kv, .. } => Some(&mut **kv),
            Self::Recurrent(_) | Self::Nothing => None,
        }
    }

    /// Returns the limits of the layer; `None` if it remembers nothing of the sequence.
    pub(super) fn limits(&self) -> Option<Limits> {
        match self {
            Self::Attention(kv) | Self::EncoderDecoder { decoder: kv, .. } => Some(kv.limits()),
            Self::Recurrent(state) => Some(state.limits()),
            Self::Nothing => None,
        }
    }

    /// See [`KvLayer::replayable`]; `None` if there is nothing to write.
    pub(super) fn replayable(&self) -> Option<usize> {
        match self {
            Self::Attention(kv) => Some(kv.replayable()),
            Self::Recurrent(state) => Some(state.replayable()),
            Self::EncoderDecoder { encoder, .. } if encoder.is_offloaded() => Some(0),
            Self::EncoderDecoder { decoder, .. } => Some(decoder.replayable()),
            Self::Nothing => None,
        }
    }

    /// Counts a token that a replayed step stored.
    pub(super) fn replayed(&mut self) {
        match self {
            Self::Attention(kv) | Self::EncoderDecoder { decoder: kv, .. } => kv.replayed(),
            Self::Recurrent(state) => state.replayed(),
            Self::Nothing => {}
        }
    }

    /// Returns the layer that counts the sequence's tokens. An encoder's keys do not count them: decoding
    /// leaves no trace there.
    pub(super) fn timed(&self) -> Option<&dyn CacheLayer> {
        match self {
            Self::Attention(kv) | Self::EncoderDecoder { decoder: kv, .. } => Some(&**kv),
            Self::Recurrent(state) => Some(&**state),
            Self::Nothing => None,
        }
    }

    pub(super) fn timed_mut(&mut self) -> Option<&mut dyn CacheLayer> {
        match self {
            Self::Attention(kv) | Self::EncoderDecoder { decoder: kv, .. } => Some(&mut **kv),
            Self::Recurrent(state) => Some(&mut **state),
            Self::Nothing => None,
        }
    }

    pub(super) fn parts(&self) -> impl Iterator<Item = &dyn CacheLayer> {
        let parts: [Option<&dyn CacheLayer>; 2] = match self {
            Self::Attention(kv) => [Some(&**kv), None],
            Self::EncoderDecoder { decoder, encoder } => [Some(&**decoder), Some(&**encoder)],
            Self::Recurrent(state) => [Some(&**state), None],
            Self::Nothing => [None, None],
        };
        parts.into_iter().flatten()
    }

    pub(super) fn parts_mut(&mut self) -> impl Iterator<Item = &mut dyn CacheLayer> {
        let parts: [Option<&mut dyn CacheLayer>; 2] = match self {
            Self::Attention(kv) => [Some(&mut **kv), None],
            Self::EncoderDecoder { decoder, encoder } => [Some(&mut **decoder), Some(&mut **encoder)],
            Self::Recurrent(state) => [Some(&mut **state), None],
            Self::Nothing => [None, None],
        };
        parts.into_iter().flatten()
    }
}
