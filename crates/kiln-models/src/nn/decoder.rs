//! A decoder that is a sequence of blocks, like most language models: its settings, its weights, and its
//! forward pass.

use std::ops::Add;

use burn::tensor::{DType, Device, Int, Tensor};
use half::{bf16, f16};
use kiln_core::{
    Error, Result,
    batch::Batch,
    layer::RowPosition,
    model::{CausalModel, ExpertTraffic, Logits, LowRankSource, WeightBytes},
    model_cache::{Pass, PassRows},
    need::LayerNeed,
    read_back::moved,
};
use kiln_kernels::{
    Activation, INVARIANT_UP_TO, Implementation, Kernels, LARGEST_HEAD, NormOrder, Placement,
};

use super::{
    attention::{AttentionConfig, Reach},
    block::{Block, BlockConfig, FeedForwardConfig, MixerConfig, StateConfig},
    experts::ExpertsConfig,
    linear::Linear,
    mlp::MlpConfig,
    names::{ByHead, Names, NormNames, TensorNames},
    norm::{Norm, NormKind},
    places::{Places, QueryTemperature},
    rope::{RopeKind, Ropes},
};
use crate::{ConfigFile, Configured, ExpertSizes, Part, Rows, Sizes, Weights, config::Common};

/// Settings of a decoder.
#[derive(Clone, Debug)]
pub(crate) struct DecoderConfig {
    pub(crate) sizes: Sizes,
    /// Rotary positions of blocks that rotate keys; `None` if none does.
    pub(crate) ropes: Option<Ropes>,
    /// Rows of the table of learned positions, which are added to the embeddings; `None` if there is none.
    pub(crate) learned_positions: Option<usize>,
    pub(crate) names: Names,
    /// Matrices and vectors whose rows are sorted by head, by the ends of their names.
    pub(crate) by_head: Vec<(&'static str, ByHead)>,
    pub(crate) norm: NormKind,
    /// Whether mixer and feed-forward of a block take the same input.
    pub(crate) parallel: bool,
    /// Factor that the outputs of mixers and feed-forwards are multiplied by.
    pub(crate) residual_scale: Option<f64>,
    /// Whether the residual is float32, whatever the type of the weights.
    pub(crate) float32_residual: bool,
    /// Factor that embeddings are multiplied by.
    pub(crate) embedding_scale: Option<Scale>,
    pub(crate) blocks: Vec<BlockConfig>,
    /// Numbers of the blocks in the checkpoint; `None` if all blocks are present, in order.
    pub(crate) numbers: Option<Vec<usize>>,
    pub(crate) mlp: MlpConfig,
    /// Whether activations stay within float16.
    pub(crate) fits_float16: bool,
    pub(crate) query_temperature: Option<QueryTemperature>,
    /// Soft cap of the logits: logit `x` becomes `final_softcap · tanh(x / final_softcap)`.
    pub(crate) final_softcap: Option<f64>,
    /// Factor that logits are multiplied by.
    pub(crate) logit_scale: Option<f64>,
    /// Whether the head has a bias.
    pub(crate) head_bias: bool,
    /// Per-layer embeddings; `None` if there are none.
    pub(crate) per_layer: Option<PerLayerConfig>,
    /// Name of a factor of the output of each block; `None` if there is none.
    pub(crate) block_scalar: Option<&'static str>,
    /// Parts of an encoder of text; `None` for a decoder.
    pub(crate) text_encoder: Option<TextEncoderConfig>,
}

/// Parts that only encoders of text have. There is neither a norm after the last block nor a head, and norms
/// after mixers and feed-forwards are those of sums (Devlin et al., 2018,
/// <https://arxiv.org/abs/1810.04805>).
#[derive(Clone, Copy, Debug)]
pub(crate) struct TextEncoderConfig {
    /// Name of the norm of the embeddings.
    pub(crate) norm: &'static str,
    /// Name of the table of types of tokens. All tokens of a text have the first.
    pub(crate) types: &'static str,
    /// Rows of that table.
    pub(crate) type_count: usize,
}

/// Settings of per-layer embeddings: each block has an input of its own, from a second table of embeddings
/// and a projection of the first (Gemma 3n and 4).
#[derive(Clone, Copy, Debug)]
pub(crate) struct PerLayerConfig {
    /// Numbers of a token for each block.
    pub(crate) width: usize,
    /// Rows of the table.
    pub(crate) vocab: usize,
    /// Blocks of the whole model.
    pub(crate) blocks: usize,
}

/// A factor of embeddings.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Scale {
    /// The factor is rounded to the type of the embeddings before the product.
    Rounded(f32),
    Exact(f32),
}

impl DecoderConfig {
    /// Creates the most common settings: norms only before attention and feed-forward, SiLU, no biases, no
    /// windows.
    pub(crate) fn new(Common { sizes, eps }: Common, ropes: Ropes) -> Self {
        let sizes = Sizes { positions: ropes.full.stretched(sizes.positions), ..sizes };
        let mut decoder = Self { ropes: Some(ropes), ..Self::without_ropes(sizes, NormKind::rms(eps)) };
        decoder.attention_mut().for_each(|attention| attention.rope = Some(RopeKind::Full));
        decoder
    }

    /// Creates the settings of [`new`](Self::new), but without positions.
    pub(crate) fn without_positions(Common { sizes, eps }: Common) -> Self {
        Self::without_ropes(sizes, NormKind::rms(eps))
    }

    /// Creates the settings of [`new`](Self::new) with this kind of norms, but without positions.
    pub(crate) fn without_ropes(sizes: Sizes, norm: NormKind) -> Self {
        Self {
            blocks: vec![BlockConfig::attention(AttentionConfig::new(&sizes)); sizes.layers],
            mlp: MlpConfig::new(&sizes),
            norm,
            parallel: false,
            residual_scale: None,
            float32_residual: false,
            embedding_scale: None,
            fits_float16: true,
            numbers: None,
            query_temperature: None,
            final_softcap: None,
            logit_scale: None,
            head_bias: false,
            per_layer: None,
            block_scalar: None,
            text_encoder: None,
            ropes: None,
            learned_positions: None,
            names: Names::default(),
            by_head: Vec::new(),
            sizes,
        }
    }

    /// Creates a decoder for the output of an encoder. Blocks have causal attention, attention to the
    /// encoder, and a feed-forward without a gate. There are layer norms, biases, and learned positions: the
    /// decoder of Vaswani et al. (2017), with norms before each part instead of after.
    pub(crate) fn of_encoder(sizes: Sizes, eps: f64, activation: Activation) -> Self {
        let attention = AttentionConfig {
            cross_attention: true,
            qkv_bias: true,
            k_bias: false,
            o_bias: true,
            o_name: "out_proj",
            ..AttentionConfig::new(&sizes)
        };
        let block = BlockConfig {
            mixer: MixerConfig::Attention(attention),
            feed_forward: Some(FeedForwardConfig::Plain(["fc1", "fc2"])),
        };
        Self {
            blocks: vec![block; sizes.layers],
            mlp: MlpConfig { bias: true, activation, ..MlpConfig::new(&sizes) },
            learned_positions: Some(sizes.positions),
            names: Names {
                model: "model.decoder",
                norm: "layer_norm",
                head: "proj_out",
                norms: NormNames::before("self_attn_layer_norm", "final_layer_norm"),
                ..Names::default()
            },
            ..Self::without_ropes(sizes, NormKind::Layer { eps, bias: true })
        }
    }

    /// Creates a decoder whose blocks are mixers with states alone. Names are those of Mamba.
    pub(crate) fn of_states(Common { sizes, eps }: Common, mixer: StateConfig) -> Self {
        Self {
            blocks: vec![BlockConfig::alone(MixerConfig::State(mixer)); sizes.layers],
            float32_residual: true,
            names: Names {
                model: "backbone",
                embeddings: "embeddings",
                norm: "norm_f",
                norms: NormNames { before_mixer: Some("norm"), ..Names::default().norms },
                state_space: "mixer",
                ..Names::default()
            },
            ..Self::without_ropes(sizes, NormKind::rms(eps))
        }
    }

    /// Checks that `heads` names at least one head, and only heads that attend to an encoder.
    ///
    /// # Errors
    /// [`Error::Setting`] for an empty list, and for heads that do not attend to an encoder.
    fn check_alignment(&self, heads: &[(usize, usize)]) -> Result<()> {
        let exists = |&(layer, head): &(usize, usize)| {
            let attention = self.blocks.get(layer).and_then(BlockConfig::attention_config);
            attention.is_some_and(|attention| attention.cross_attention && head < attention.heads)
        };
        match heads.iter().find(|head| !exists(head)) {
            None if !heads.is_empty() => Ok(()),
            None => Err(Error::Setting { name: "alignment_heads", why: "are none; name some".to_owned() }),
            Some((layer, head)) => {
                let why = format!(
                    "name head {head} of layer {layer}, and the model has no such head that attends to an encoder"
                );
                Err(Error::Setting { name: "alignment_heads", why })
            }
        }
    }

    /// Checks that blocks that share keys are on one device.
    fn check_stages(&self, placement: &Placement) -> Result<()> {
        let device = |i: usize| placement.of(i).device();
        for (i, block) in self.blocks.iter().enumerate() {
            let MixerConfig::SharedAttention(own) = &block.mixer else { continue };
            let keeps = |block: &BlockConfig| match &block.mixer {
                MixerConfig::Attention(other) => other.keeps && other.rope == own.rope,
                _ => false,
            };
            let source = self.blocks[..i].iter().rposition(keeps);
            if source.is_none_or(|source| device(source) != device(i)) {
                let why = format!(
                    "put block {i} on another device than the block whose keys it attends to; put all blocks from {} on one",
                    source.unwrap_or(0)
                );
                return Err(Error::Setting { name: "stages", why });
            }
        }
        Ok(())
    }

    /// Whether GPUs compute a block with other kernels, or with references, for more than a few rows: one
    /// that chooses among experts, has latent attention, or attends with long vectors.
    fn computes_by_references(&self) -> bool {
        let is_long = |attention: &AttentionConfig| attention.head_dim > LARGEST_HEAD;
        self.attention().any(is_long)
            || self.blocks.iter().any(|BlockConfig { mixer, feed_forward }| {
                matches!(mixer, MixerConfig::Latent(_))
                    || matches!(
                        feed_forward,
                        Some(FeedForwardConfig::Experts(_) | FeedForwardConfig::Beside(..))
                    )
            })
    }

    /// Settings of the attention of all blocks that have attention.
    pub(crate) fn attention(&self) -> impl Iterator<Item = &AttentionConfig> {
        self.blocks.iter().filter_map(BlockConfig::attention_config)
    }

    /// Settings of all attention blocks, to be changed
    pub(crate) fn attention_mut(&mut self) -> impl Iterator<Item = &mut AttentionConfig> {
        self.blocks.iter_mut().filter_map(|block| match &mut block.mixer {
            MixerConfig::Attention(attention) => Some(attention),
            MixerConfig::Hybrid(hybrid) => Some(&mut hybrid.attention),
            _ => None,
        })
    }

    /// Sets whether the projections of attention have biases.
    pub(crate) fn set_attention_bias(&mut self, bias: bool) {
        for attention in self.attention_mut() {
            (attention.qkv_bias, attention.o_bias) = (bias, bias);
        }
    }

    /// Gives each attention block its window in `windows`, and blocks with one the rotation of such blocks.
    pub(crate) fn set_windows(&mut self, windows: Vec<Option<usize>>) {
        for (attention, window) in self.attention_mut().zip(windows) {
            if let Some(window) = window {
                attention.reach = Reach::Window(window);
                attention.rope = attention.rope.map(|_| RopeKind::Sliding);
            }
        }
    }

    /// Removes the rotation from attention blocks for whose number `rotates` returns false.
    pub(crate) fn set_rotating(&mut self, rotates: impl Fn(usize) -> bool) {
        for (_, attention) in self.attention_mut().enumerate().filter(|(i, _)| !rotates(*i)) {
            attention.rope = None;
        }
    }

    /// Gives all blocks this feed-forward.
    pub(crate) fn set_feed_forward(&mut self, feed_forward: FeedForwardConfig) {
        self.blocks.iter_mut().for_each(|block| block.feed_forward = Some(feed_forward));
    }

    /// Makes the feed-forwards of the blocks for which `is_mixture` returns true mixtures of experts.
    pub(crate) fn set_experts(&mut self, experts: ExpertsConfig, is_mixture: impl Fn(usize) -> bool) {
        let mut blocks = 0;
        for (_, block) in self.blocks.iter_mut().enumerate().filter(|(i, _)| is_mixture(*i)) {
            block.feed_forward = Some(FeedForwardConfig::Experts(experts));
            blocks += 1;
        }
        let ExpertsConfig { experts, chosen, intermediate, latent, shared, names, .. } = experts;
        let sizes = ExpertSizes {
            experts,
            chosen,
            intermediate,
            inputs: latent.unwrap_or(self.sizes.hidden),
            matrices: 2 + usize::from(names.gate.is_some()),
            shared: shared.map_or(0, |s| s.width),
            blocks,
        };
        self.sizes.experts = (blocks > 0).then_some(sizes);
    }

    /// Replaces attention by mixers with states in the blocks that `attends` does not mark.
    pub(crate) fn set_states(&mut self, mixer: StateConfig, channels: usize, attends: &[bool]) {
        for (block, _) in self.blocks.iter_mut().zip(attends).filter(|(_, attends)| !**attends) {
            block.mixer = MixerConfig::State(mixer);
            self.sizes.state_channels = channels;
        }
    }

    /// Calls [`set_experts`](Self::set_experts) for each block whose number, counted from 1, is a multiple of
    /// `decoder_sparse_step`, except the blocks in `mlp_only_layers`, counted from 0.
    ///
    /// # Errors
    /// [`Error::File`] for a step of 0.
    pub(crate) fn set_sparse_experts(
        &mut self,
        config: &ConfigFile,
        experts: ExpertsConfig,
        decoder_sparse_step: usize,
        mlp_only_layers: &[usize],
    ) -> Result<()> {
        config.check("decoder_sparse_step", decoder_sparse_step, usize::MAX)?;
        self.set_experts(experts, |i| {
            (i + 1).is_multiple_of(decoder_sparse_step) && !mlp_only_layers.contains(&i)
        });
        Ok(())
    }

    /// Creates the settings that all Gemmas share.
    pub(crate) fn gemma(common: Common, ropes: Ropes) -> Self {
        let eps = common.eps;
        let mut decoder = Self::new(common, ropes);
        decoder.norm = NormKind::Rms { eps, order: NormOrder::ScaleThenCast };
        decoder.embedding_scale = Some(Scale::Rounded((decoder.sizes.hidden as f64).sqrt() as f32));
        decoder
    }
}

impl Configured for DecoderConfig {
    fn sizes(&self) -> Sizes {
        self.sizes.clone()
    }

    fn fits_float16(&self) -> bool {
        self.fits_float16
    }

    fn needs(&self) -> Vec<LayerNeed> {
        let need = |block: &BlockConfig| match block.mixer {
            MixerConfig::Attention(attention) => attention.need(self.ropes.as_ref()),
            MixerConfig::SharedAttention(_) => LayerNeed::default(),
            MixerConfig::Latent(latent) => latent.need(self.ropes.as_ref()),
            MixerConfig::State(state) => state.need().into(),
            MixerConfig::Hybrid(hybrid) => hybrid.need(self.ropes.as_ref()),
            MixerConfig::Nothing => LayerNeed::default(),
        };
        self.blocks.iter().map(need).collect()
    }

    fn ropes(&self) -> Option<&Ropes> {
        self.ropes.as_ref()
    }

    fn tensor_names(&self) -> TensorNames {
        self.tensor_names()
    }

    fn load(&self, weights: &mut dyn Weights, placement: &Placement) -> Result<Box<dyn CausalModel>> {
        Ok(Box::new(Decoder::load(self, weights, placement)?))
    }

    fn is_bidirectional(&self) -> bool {
        self.attention().any(|attention| attention.bidirectional)
    }

    fn only(&self, blocks: &[usize]) -> Option<Box<dyn Configured>> {
        if self.is_bidirectional() {
            return None;
        }
        // A block that attends to the keys of another cannot be without it.
        if self.blocks.iter().any(|block| matches!(block.mixer, MixerConfig::SharedAttention(_))) {
            return None;
        }
        let kept: Option<Vec<_>> = blocks.iter().map(|block| self.blocks.get(*block).copied()).collect();
        Some(Box::new(Self {
            blocks: kept?,
            numbers: Some(blocks.to_vec()),
            sizes: Sizes { layers: blocks.len(), ..self.sizes.clone() },
            ..self.clone()
        }))
    }
}

/// Modules of per-layer embeddings: their table, the projection of usual embeddings, and its norm.
pub(crate) const PER_LAYER: [&str; 3] =
    ["embed_tokens_per_layer", "per_layer_model_projection", "per_layer_projection_norm"];

/// See [`PerLayerConfig`].
#[derive(Clone, Debug)]
struct PerLayerEmbeddings {
    /// `[vocab, blocks · width]`
    table: Rows,
    projection: Linear,
    norm: Norm,
    config: PerLayerConfig,
}

impl PerLayerEmbeddings {
    fn load(config: PerLayerConfig, decoder: &DecoderConfig, weights: &mut dyn Weights) -> Result<Self> {
        let hidden = decoder.sizes.hidden;
        let [table, projection, norm] = PER_LAYER;
        let part = |part: &str| format!("{}.{part}", decoder.names.model);
        let all = config.blocks * config.width;
        let table = [Part::new(part(&format!("{table}.weight")), config.vocab)];
        let projection = Linear::load(weights, &part(projection), [hidden, all], false)?;
        Ok(Self {
            table: weights.rows(&table, all)?,
            projection: projection.times(1.0, &[((hidden as f64).powf(-0.5), all)]),
            norm: Norm::load(weights, &part(norm), config.width, decoder.norm)?,
            config,
        })
    }

    fn bytes(&self) -> usize {
        self.projection.bytes() + self.norm.bytes()
    }

    /// Returns the inputs of all blocks, `[batch, tokens, blocks · width]`.
    fn compute(&self, tokens: Tensor<2, Int>, embeddings: Tensor<3>, kernels: &Kernels) -> Tensor<3> {
        let width = self.config.width;
        let own = self.table.select(tokens, kernels);
        let dtype = own.dtype();
        let own = own * rounded((width as f64).sqrt() as f32, dtype);
        let projected = self.projection.forward(embeddings, kernels);
        let [batch, tokens, all] = projected.dims();
        let normed = self.norm.forward(projected.reshape([batch, tokens * (all / width), width]), kernels);
        (normed.reshape([batch, tokens, all]) + own) * std::f64::consts::FRAC_1_SQRT_2
    }
}

/// See [`TextEncoderConfig`].
#[derive(Clone, Debug)]
struct TextEncoderParts {
    /// Embedding of the first type of tokens, `[1, 1, hidden]`.
    of_type: Tensor<3>,
    norm: Norm,
}

impl TextEncoderParts {
    fn load(
        TextEncoderConfig { norm, types, type_count }: TextEncoderConfig,
        decoder: &DecoderConfig,
        weights: &mut dyn Weights,
    ) -> Result<Self> {
        let (model, hidden) = (decoder.names.model, decoder.sizes.hidden);
        let norm = Norm::load(weights, &format!("{model}.{norm}"), hidden, decoder.norm)?;
        let table = weights.float32(&format!("{model}.{types}.weight"), &[type_count, hidden])?;
        let of_type = table.narrow(0, 0, hidden).reshape([1, 1, hidden]).cast(norm.dtype());
        Ok(Self { of_type, norm })
    }

    fn bytes(&self) -> usize {
        self.norm.bytes() + self.of_type.shape().num_elements() * self.of_type.dtype().size()
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Decoder {
    embed_tokens: Rows,
    /// Learned positions `[positions, hidden]`.
    embed_positions: Option<Rows>,
    per_layer: Option<PerLayerEmbeddings>,
    text_encoder: Option<TextEncoderParts>,
    layers: Vec<Block>,
    /// Norm after the last block.
    norm: Option<Norm>,
    /// `None` for a model that only turns texts into embeddings.
    lm_head: Option<Linear>,
    /// Type of most weights.
    dtype: DType,
    config: DecoderConfig,
    placement: Placement,
}

impl Decoder {
    pub(crate) fn load(
        config: &DecoderConfig,
        weights: &mut dyn Weights,
        placement: &Placement,
    ) -> Result<Self> {
        let Sizes { hidden, vocab, tied, .. } = config.sizes;
        let Names { model, embeddings, positions, layers, norm, head, .. } = config.names;
        config.attention().try_for_each(|attention| attention.check(config.ropes.as_ref()))?;
        let embeddings = [Part::new(format!("{model}.{embeddings}.weight"), vocab)];
        let embed_tokens = weights.rows(&embeddings, hidden)?;
        let table = |rows| Part::new(format!("{model}.{positions}.weight"), rows);
        let embed_positions = config.learned_positions.map(|rows| weights.rows(&[table(rows)], hidden));
        let block = |(i, block): (usize, &BlockConfig)| {
            let number = config.numbers.as_ref().and_then(|numbers| numbers.get(i).copied()).unwrap_or(i);
            weights.begin_block(i);
            Block::load(weights, &format!("{model}.{layers}.{number}"), block, config)
        };
        let layers: Result<_> = config.blocks.iter().enumerate().map(block).collect();
        if placement.blocks(config.blocks.len()).any(|(blocks, _)| blocks.is_empty()) {
            let why = format!("leave one without a block; the model has {} blocks", config.blocks.len());
            return Err(Error::Setting { name: "stages", why });
        }
        config.check_stages(placement)?;
        let text_encoder = config.text_encoder.map(|parts| TextEncoderParts::load(parts, config, weights));
        let text_encoder = text_encoder.transpose()?;
        let norm = match text_encoder {
            Some(_) => None,
            None => Some(Norm::load(weights, &format!("{model}.{norm}"), hidden, config.norm)?),
        };
        let of_embeddings = text_encoder.as_ref().map(|parts| &parts.norm);
        Ok(Self {
            dtype: norm.as_ref().or(of_embeddings).map_or(DType::F32, Norm::dtype),
            embed_positions: embed_positions.transpose()?,
            per_layer: config
                .per_layer
                .map(|own| PerLayerEmbeddings::load(own, config, weights))
                .transpose()?,
            layers: layers?,
            lm_head: match tied {
                _ if text_encoder.is_some() => None,
                // The folder of a model that was saved to make embeddings.
                false if !weights.has(&format!("{head}.weight")) => None,
                true if shares_head(placement) => Some(Linear::from(embed_tokens.clone())),
                true => Some(Linear::from(weights.rows(&embeddings, hidden)?)),
                false => Some(Linear::load(weights, head, [hidden, vocab], config.head_bias)?),
            },
            norm,
            text_encoder,
            embed_tokens,
            config: config.clone(),
            placement: placement.clone(),
        })
    }

    /// Stores the keys and values that the blocks compute from `encoded` `[rows, positions, hidden]`.
    pub(crate) fn condition(&self, encoded: &Tensor<3>, pass: &mut Pass<'_>) -> Result<()> {
        let mut encoded = encoded.clone();
        for (i, block) in self.layers.iter().enumerate() {
            let kernels = self.placement.of(i);
            encoded = moved(encoded, kernels.device())?;
            block.condition(&encoded, i, pass, kernels)?;
        }
        Ok(())
    }
}

impl CausalModel for Decoder {
    fn needs(&self) -> Vec<LayerNeed> {
        self.config.needs()
    }

    fn vocab(&self) -> usize {
        self.config.sizes.vocab
    }

    fn element_bytes(&self) -> usize {
        self.dtype.size()
    }

    fn weight_bytes(&self) -> WeightBytes {
        let blocks = self.layers.iter().map(Block::bytes).fold(WeightBytes::default(), Add::add);
        let norms = self.norm.as_ref().map_or(0, Norm::bytes)
            + self.text_encoder.as_ref().map_or(0, TextEncoderParts::bytes);
        let head = norms + self.lm_head.as_ref().map_or(0, Linear::bytes);
        let is_head = self.lm_head.is_some() && self.config.sizes.tied && shares_head(&self.placement);
        let looked_up = if is_head { 0 } else { self.embed_tokens.bytes() };
        let positions = self.embed_positions.as_ref().map_or(0, Rows::bytes);
        let table = self.per_layer.as_ref().map_or(0, |own| own.table.bytes());
        let projection = self.per_layer.as_ref().map_or(0, PerLayerEmbeddings::bytes);
        blocks
            + WeightBytes {
                held: head + looked_up + positions + table + projection,
                in_host_memory: 0,
                multiplied: head + projection,
            }
    }

    fn exact_rows(&self) -> usize {
        let kernels = |linear: &Linear| {
            let device = linear.device();
            self.placement.iter().find(|kernels| Some(kernels.device()) == device.as_ref())
        };
        let is_whole = |kernels: &Kernels| kernels.left_out().next().is_none();
        let is_native = |kernels: &Kernels| kernels.implementation() == Implementation::Native;
        let is_limited = self.config.computes_by_references() && !self.placement.iter().all(is_native);
        if is_limited || !self.placement.iter().all(is_whole) {
            return INVARIANT_UP_TO;
        }
        // The projections of a copy, which shares all weights.
        let mut copy = self.clone();
        let rows = |linear: &mut Linear| {
            kernels(linear).map_or(INVARIANT_UP_TO, |kernels| linear.exact_rows(kernels))
        };
        copy.linears().into_iter().map(rows).min().unwrap_or(INVARIANT_UP_TO)
    }

    fn expert_traffic(&self) -> Option<ExpertTraffic> {
        self.layers.iter().filter_map(Block::expert_traffic).reduce(Add::add)
    }

    fn is_bidirectional(&self) -> bool {
        self.config.is_bidirectional()
    }

    fn has_head(&self) -> bool {
        self.lm_head.is_some()
    }

    fn reads_shared_buffers(&self) -> bool {
        !self.config.is_bidirectional()
            && !self.config.blocks.iter().any(|block| matches!(block.mixer, MixerConfig::Latent(_)))
    }

    fn can_be_captured(&self) -> bool {
        // With experts in host memory, routing is read back; between devices, hidden states are.
        !self.layers.iter().any(Block::has_experts_away) && self.further_devices().is_empty()
    }

    fn further_devices(&self) -> Vec<Device> {
        let first = self.placement.first().device();
        self.placement.iter().map(Kernels::device).filter(|device| *device != first).cloned().collect()
    }

    fn working_bytes(&self, rows: usize, tokens: usize) -> usize {
        self.config.sizes.working_bytes(rows, tokens, self.element_bytes())
    }

    fn max_positions(&self) -> Option<usize> {
        self.config.learned_positions
    }

    fn rotary_tables(
        &self,
        rows: &[RowPosition],
        steps: usize,
        device: &Device,
    ) -> Vec<(Tensor<3>, Tensor<3>)> {
        let ropes = self.config.ropes.iter().flat_map(Ropes::all);
        ropes.map(|rope| rope.step_tables(rows, steps, device)).collect()
    }

    fn ties_embeddings(&self) -> bool {
        self.config.sizes.tied
    }

    fn adapt(&mut self, source: &mut dyn LowRankSource, merges: bool) -> Result<()> {
        self.linears().into_iter().try_for_each(|linear| linear.adapt(source, merges))
    }

    fn another(&self) -> Result<Box<dyn CausalModel>> {
        Ok(Box::new(self.clone()))
    }

    fn compute(&self, batch: &Batch, logits: Logits<'_>, pass: &mut Pass<'_>) -> Result<Tensor<3>> {
        let (ropes, kernels) = (self.config.ropes.as_ref(), self.placement.first());
        let mut places = self.placement.map(|kernels| Places::new(batch, ropes, pass, kernels.device()));
        if let Logits::Alignment(heads) = logits {
            self.config.check_alignment(heads)?;
            places.first().check_even()?;
            places.iter_mut().for_each(|places| places.aligned = heads);
        }
        if let Some(temperature) = self.config.query_temperature {
            places.iter_mut().for_each(|places| places.set_temperature(temperature, pass));
        }
        let mut x = self.embed_tokens.select(places.first().tokens()?, kernels);
        let dtype = x.dtype();
        x = match self.config.embedding_scale {
            Some(Scale::Rounded(scale)) => x * rounded(scale, dtype),
            Some(Scale::Exact(scale)) => (x.cast(DType::F32) * scale).cast(dtype),
            None => x,
        };
        if let Some(table) = &self.embed_positions {
            x = x + table.select(places.first().token_positions(pass, false), kernels);
        }
        if let Some(TextEncoderParts { of_type, norm }) = &self.text_encoder {
            x = norm.forward(x + of_type.clone(), kernels);
        }
        let mut per_layer = match &self.per_layer {
            Some(own) => Some(own.compute(places.first().tokens()?, x.clone(), kernels)),
            None => None,
        };
        if self.config.float32_residual {
            x = x.cast(DType::F32);
        }
        let device = self.placement.last().device().clone();
        // Inputs of the head.
        let mut hidden = Vec::new();
        let reads_last = matches!(logits, Logits::Last | Logits::Early(_)) && batch.len() > 1;
        let has_tokens = pass.rows().all(|PassRows { skip, .. }| skip < batch.len());
        let first_reader = self.first_reader().filter(|_| reads_last && has_tokens);
        for (i, block) in self.layers.iter().enumerate() {
            if first_reader == Some(i) {
                // From here on, no token looks at the others.
                per_layer = per_layer.map(|all| places.first().last(all));
                x = places.of_mut(i.saturating_sub(1)).last(x);
                places.iter_mut().for_each(Places::keep_last);
            }
            let (places, kernels) = (places.of_mut(i), self.placement.of(i));
            x = moved(x, kernels.device())?;
            if matches!(logits, Logits::Early(layers) if layers.contains(&i)) {
                hidden.push(places.last(x.clone()));
            }
            let own = match (&per_layer, self.config.per_layer) {
                (Some(all), Some(PerLayerConfig { width, .. })) => {
                    Some(moved(all.clone().narrow(2, self.number(i) * width, width), kernels.device())?)
                }
                _ => None,
            };
            x = block.forward(x, own, i, places, pass, kernels)?;
        }
        if matches!(logits, Logits::Alignment(_)) {
            let alignments = places.iter_mut().flat_map(|places| std::mem::take(&mut places.alignments));
            let alignments = alignments.map(|alignment| moved(alignment, &device));
            return Ok(side_by_side(alignments.collect::<Result<_>>()?));
        }
        x = moved(x, &device)?;
        let hidden = hidden.into_iter().map(|x| moved(x, &device)).collect::<Result<Vec<_>>>()?;
        let (places, kernels) = (places.last(), self.placement.last());
        let x = match logits {
            Logits::All | Logits::Hidden | Logits::Alignment(_) => x,
            Logits::Last | Logits::Early(_) => places.last(x),
        };
        let x = match &self.norm {
            Some(norm) => norm.forward(x, kernels),
            None => x,
        };
        let x = x.cast(self.dtype);
        Ok(match (logits, hidden.len()) {
            (Logits::Hidden, _) => places.whole(x),
            (Logits::All, _) => places.whole(self.head(x)),
            (_, 0) => self.head(x),
            (_, early) => {
                let logits = self.project(Tensor::cat(hidden.into_iter().chain([x]).collect(), 1));
                // Early layers have neither scale nor softcap.
                let own = self.scaled(logits.clone().narrow(1, early, 1));
                Tensor::cat(vec![logits.narrow(1, 0, early), own], 1)
            }
        })
    }

    fn head(&self, hidden: Tensor<3>) -> Tensor<3> {
        self.scaled(self.project(hidden))
    }
}

impl Decoder {
    /// The projections that an adapter may change.
    pub(crate) fn linears(&mut self) -> Vec<&mut Linear> {
        let per_layer = self.per_layer.iter_mut().map(|own| &mut own.projection);
        let blocks = self.layers.iter_mut().flat_map(Block::linears);
        blocks.chain(per_layer).chain(&mut self.lm_head).collect()
    }

    /// Returns the first of the last blocks, which only read keys and values of earlier ones; `None` if there
    /// are none.
    fn first_reader(&self) -> Option<usize> {
        let reads = |block: &BlockConfig| matches!(block.mixer, MixerConfig::SharedAttention(_));
        let first = self.config.blocks.iter().rposition(|block| !reads(block))? + 1;
        (first < self.layers.len()).then_some(first)
    }

    /// Number of block `i` in the checkpoint.
    fn number(&self, i: usize) -> usize {
        self.config.numbers.as_ref().and_then(|numbers| numbers.get(i).copied()).unwrap_or(i)
    }

    /// Returns logits in float32, without scale and softcap.
    fn project(&self, hidden: Tensor<3>) -> Tensor<3> {
        let hidden = hidden.cast(self.dtype);
        match &self.lm_head {
            Some(head) => head.forward(hidden, self.placement.last()).cast(DType::F32),
            // `forward` returns hidden states alone of such a model.
            None => hidden.cast(DType::F32),
        }
    }

    fn scaled(&self, logits: Tensor<3>) -> Tensor<3> {
        let logits = match self.config.logit_scale {
            Some(scale) => logits * scale,
            None => logits,
        };
        match self.config.final_softcap {
            Some(cap) => (logits / cap).tanh() * cap,
            None => logits,
        }
    }
}

/// Whether the head of a model that ties it to the embeddings is on their device.
fn shares_head(placement: &Placement) -> bool {
    placement.first().device() == placement.last().device()
}

/// Joins the results of several layers `[rows, heads, tokens, positions]` to
/// `[rows · heads, tokens, positions]`.
fn side_by_side(layers: Vec<Tensor<4>>) -> Tensor<3> {
    let all = Tensor::cat(layers, 1);
    let [rows, heads, tokens, positions] = all.dims();
    all.reshape([rows * heads, tokens, positions])
}

/// Rounds `value` to the precision of `dtype`.
fn rounded(value: f32, dtype: DType) -> f32 {
    match dtype {
        DType::F16 => f16::from_f32(value).to_f32(),
        DType::BF16 => bf16::from_f32(value).to_f32(),
        _ => value,
    }
}

#[cfg(test)]
mod differing_blocks;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_embedding_scale_is_rounded_as_the_reference_rounds_it() {
        let scale = (3072f64).sqrt() as f32;
        assert_eq!(rounded(scale, DType::BF16), 55.5);
        assert_eq!(rounded(scale, DType::F16), 55.4375);
        assert_eq!(rounded(scale, DType::F32), scale);
    }
}
