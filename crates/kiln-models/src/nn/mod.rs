//! Blocks that models share.

pub(crate) mod attention;
pub(crate) mod audio_encoder;
pub(crate) mod block;
pub(crate) mod cross_attention;
pub(crate) mod decoder;
pub(crate) mod delta_net;
pub(crate) mod experts;
pub(crate) mod hybrid;
pub(crate) mod latent;
pub(crate) mod linear;
pub(crate) mod mamba;
pub(crate) mod mamba2;
pub(crate) mod mlp;
pub(crate) mod names;
pub(crate) mod norm;
pub(crate) mod places;
mod projections;
pub(crate) mod rope;
mod shared_attention;
pub(crate) mod short_conv;
mod states;
