//! Models, one file per `model_type`; [`ARCHITECTURES`] is the list.
//!
//! **Invariant:** no cache strategy is named here. A model says what it needs ([`LayerNeed`]), uses the layer
//! of the cache that it is given for each block, and knows only its trait.
#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "tests write files of their own"))]
#![forbid(unsafe_code)]

use std::fmt;

use kiln_core::{
    Error, Result,
    model::{CausalModel, FeatureShape},
    need::LayerNeed,
};
use kiln_kernels::Placement;

mod bamba;
mod bert;
pub mod checkpoint;
mod cohere2;
mod config;
mod deepseek_v2;
mod deepseek_v3;
mod ernie4_5;
mod exaone4;
mod falcon_h1;
mod falcon_mamba;
mod fields;
mod gemma;
mod gemma2;
mod gemma3_text;
mod gemma4_text;
mod gemma4_unified_text;
mod glm4;
mod glm4_moe;
mod glm4_moe_lite;
mod gpt2;
mod gpt_neox;
mod gpt_oss;
mod granite;
mod granitemoehybrid;
mod jamba;
mod lfm2;
mod lfm2_moe;
mod llama;
mod llama4_text;
mod mamba;
mod mamba2;
mod ministral3;
mod mistral;
mod mixtral;
mod multimodal;
mod nemotron_h;
mod nn;
mod olmo2;
mod olmo3;
mod phi;
mod phi3;
mod qwen2;
mod qwen2_5_vl_text;
mod qwen2_moe;
mod qwen3;
mod qwen3_5_moe_text;
mod qwen3_5_text;
mod qwen3_moe;
mod qwen3_next;
mod qwen3_vl_text;
mod random;
mod seed_oss;
mod smollm3;
mod starcoder2;
mod weights;
mod whisper;
mod windows;

/// Chooses the format that each tensor is packed in.
pub use kiln_weights::Mixture;

pub use config::{ConfigFile, ExpertSizes, Sizes};
pub use nn::{
    names::TensorNames,
    rope::{Rope, Ropes},
};
pub use random::{RandomWeights, count_elements};
pub use weights::{ExpertPlace, HostMatrix, HostRows, LoadTarget, Part, Rows, Weights};

/// A reader of the configs of one `model_type`.
pub trait Architecture: fmt::Debug + Sync {
    /// Value of `model_type` in the checkpoint's `config.json`.
    fn model_type(&self) -> &'static str;

    /// Reads and checks the config; weights are not read.
    ///
    /// # Errors
    /// [`Error::Setting`] or [`Error::File`] for a field that is missing, impossible or not supported.
    fn configure(&self, config: &ConfigFile) -> Result<Box<dyn Configured>>;
}

/// A model whose config was read and checked.
pub trait Configured: fmt::Debug {
    /// Sizes of the decoder.
    fn sizes(&self) -> Sizes;

    /// Whether activations stay within the range of float16. If not, the dtype `auto` is not float16.
    fn fits_float16(&self) -> bool {
        true
    }

    /// The cache layers that the model needs, one entry per block.
    fn needs(&self) -> Vec<LayerNeed>;

    /// Shape of the encoder's input; `None` for a model without an encoder.
    fn features(&self) -> Option<FeatureShape> {
        None
    }

    /// Rotary position embeddings of the model, if it has any.
    fn ropes(&self) -> Option<&Ropes>;

    /// Names of the model's tensors, and the aliases that checkpoints use.
    fn tensor_names(&self) -> TensorNames;

    /// Loads the weights to the devices of the blocks.
    ///
    /// # Errors
    /// The errors of `weights`, such as a missing tensor or one of another shape; errors of the device.
    fn load(&self, weights: &mut dyn Weights, placement: &Placement) -> Result<Box<dyn CausalModel>>;

    /// Whether tokens see later ones; see [`CausalModel::is_bidirectional`].
    fn is_bidirectional(&self) -> bool {
        false
    }

    /// Returns a smaller model with only these blocks, in ascending order, for the comparison of a device
    /// with the CPU; `None` if the model does not support it.
    fn only(&self, _blocks: &[usize]) -> Option<Box<dyn Configured>> {
        None
    }
}

/// Every architecture. A new entry makes it loadable; CONTRIBUTING.md lists the other files that it needs.
pub static ARCHITECTURES: &[&dyn Architecture] = &[
    &llama::Llama,
    &mistral::Mistral,
    &llama4_text::Llama4Text,
    &ministral3::Ministral3,
    &qwen2::Qwen2,
    &qwen3::Qwen3,
    &phi3::Phi3,
    &gemma::Gemma,
    &gemma2::Gemma2,
    &gemma3_text::Gemma3Text,
    &gemma4_text::Gemma4Text,
    &gemma4_unified_text::Gemma4UnifiedText,
    &smollm3::SmolLm3,
    &olmo2::Olmo2,
    &olmo3::Olmo3,
    &exaone4::Exaone4,
    &granite::Granite,
    &cohere2::Cohere2,
    &glm4::Glm4,
    &starcoder2::Starcoder2,
    &gpt2::Gpt2,
    &gpt_neox::GptNeoX,
    &phi::Phi,
    &seed_oss::SeedOss,
    &ernie4_5::Ernie45,
    &mamba::Mamba,
    &falcon_mamba::FalconMamba,
    &mixtral::Mixtral,
    &qwen2_moe::Qwen2Moe,
    &qwen3_moe::Qwen3Moe,
    &qwen3_next::Qwen3Next,
    &qwen3_5_text::Qwen35Text,
    &qwen3_5_moe_text::Qwen35MoeText,
    &qwen2_5_vl_text::Qwen25VlText,
    &qwen3_vl_text::Qwen3VlText,
    &gpt_oss::GptOss,
    &glm4_moe::Glm4Moe,
    &glm4_moe_lite::Glm4MoeLite,
    &deepseek_v2::DeepseekV2,
    &deepseek_v3::DeepseekV3,
    &jamba::Jamba,
    &lfm2::Lfm2,
    &lfm2_moe::Lfm2Moe,
    &mamba2::Mamba2,
    &bamba::Bamba,
    &granitemoehybrid::GraniteMoeHybrid,
    &nemotron_h::NemotronH,
    &falcon_h1::FalconH1,
    &bert::Bert,
    &whisper::Whisper,
];

/// Reads `config` with the architecture that its `model_type` names.
///
/// # Errors
/// [`Error::Unknown`] listing the known architectures, or the error from [`Architecture::configure`].
pub fn configure(config: &ConfigFile) -> Result<Box<dyn Configured>> {
    let model_type = config.model_type()?;
    match ARCHITECTURES.iter().find(|a| a.model_type() == model_type) {
        Some(architecture) => {
            fields::check(config, &model_type)?;
            architecture.configure(config)
        }
        None => Err(Error::Unknown {
            what: "architecture (model_type in config.json)",
            name: model_type,
            known: ARCHITECTURES.iter().map(|a| a.model_type().to_owned()).collect(),
        }),
    }
}
