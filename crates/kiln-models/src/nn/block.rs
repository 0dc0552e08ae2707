//! A block: a mixer, which looks at other tokens, and a feed-forward, which does not.

use burn::tensor::{DType, Tensor};
use kiln_core::{
    Result,
    model::{ExpertTraffic, WeightBytes},
    model_cache::Pass,
    need::RecurrentNeed,
};
use kiln_kernels::{Activation, Gated, Kernels};

use super::{
    attention::{Attention, AttentionConfig},
    cross_attention::CrossAttention,
    decoder::DecoderConfig,
    delta_net::{DeltaNet, DeltaNetConfig},
    experts::{Experts, ExpertsConfig},
    hybrid::{Hybrid, HybridConfig},
    latent::{LatentAttention, LatentConfig},
    linear::Linear,
    mamba::{Mamba, MambaConfig},
    mamba2::{Mamba2, Mamba2Config},
    mlp::{Mlp, MlpConfig},
    names::NormNames,
    norm::{Norm, Normed},
    places::Places,
    shared_attention::SharedAttention,
    short_conv::{ShortConv, ShortConvConfig},
    states::StateMixer,
};
use crate::Weights;

/// Settings of a block.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BlockConfig {
    pub(crate) mixer: MixerConfig,
    /// Settings of the feed-forward; `None` if the block is only a mixer.
    pub(crate) feed_forward: Option<FeedForwardConfig>,
}

/// The token-mixing half of a block.
#[derive(Clone, Copy, Debug)]
pub(crate) enum MixerConfig {
    Attention(AttentionConfig),
    /// Attention to the keys of an earlier block.
    SharedAttention(AttentionConfig),
    Latent(LatentConfig),
    State(StateConfig),
    Hybrid(HybridConfig),
    /// The block is only a feed-forward.
    Nothing,
}

/// Settings of a mixer with states.
#[derive(Clone, Copy, Debug)]
pub(crate) enum StateConfig {
    Mamba(MambaConfig),
    Mamba2(Mamba2Config),
    DeltaNet(DeltaNetConfig),
    ShortConv(ShortConvConfig),
}

impl StateConfig {
    pub(crate) fn need(&self) -> RecurrentNeed {
        match self {
            Self::Mamba(mamba) => mamba.need(),
            Self::Mamba2(mamba) => mamba.need(),
            Self::DeltaNet(delta) => delta.need(),
            Self::ShortConv(conv) => conv.need(),
        }
    }

    /// Reads the weights of mixer `name`. `dtype` is the type of most weights.
    pub(crate) fn load(
        self,
        weights: &mut dyn Weights,
        name: &str,
        dtype: DType,
    ) -> Result<Box<dyn StateMixer>> {
        Ok(match self {
            Self::Mamba(mamba) => Box::new(Mamba::load(weights, name, mamba, dtype)?),
            Self::Mamba2(mamba) => Box::new(Mamba2::load(weights, name, mamba, dtype)?),
            Self::DeltaNet(delta) => Box::new(DeltaNet::load(weights, name, delta, dtype)?),
            Self::ShortConv(conv) => Box::new(ShortConv::load(weights, name, conv, dtype)?),
        })
    }
}

/// The per-token half of a block.
#[derive(Clone, Copy, Debug)]
pub(crate) enum FeedForwardConfig {
    /// A gated feed-forward with the settings in [`DecoderConfig::mlp`].
    Gated,
    /// A gated feed-forward of another width.
    GatedOf(usize),
    /// Two projections without a gate, with these names and the settings in [`DecoderConfig::mlp`].
    Plain([&'static str; 2]),
    Experts(ExpertsConfig),
    /// A mixture and a gated feed-forward of this width side by side, each with norms of its own
    /// (`Gemma4TextDecoderLayer`).
    Beside(ExpertsConfig, usize),
}

impl BlockConfig {
    /// Creates the most common block: attention and a gated feed-forward.
    pub(crate) fn attention(attention: AttentionConfig) -> Self {
        Self {
            feed_forward: Some(FeedForwardConfig::Gated),
            ..Self::alone(MixerConfig::Attention(attention))
        }
    }

    /// Creates a block that consists of a mixer alone.
    pub(crate) fn alone(mixer: MixerConfig) -> Self {
        Self { mixer, feed_forward: None }
    }

    /// Settings of attention; `None` if the block has another mixer.
    pub(crate) fn attention_config(&self) -> Option<&AttentionConfig> {
        match &self.mixer {
            MixerConfig::Attention(attention) => Some(attention),
            MixerConfig::Hybrid(hybrid) => Some(&hybrid.attention),
            MixerConfig::SharedAttention(_)
            | MixerConfig::Latent(_)
            | MixerConfig::State(_)
            | MixerConfig::Nothing => None,
        }
    }
}

#[derive(Clone, Debug)]
#[allow(clippy::large_enum_variant, reason = "there is one in each block")]
enum Mixer {
    Attention(Attention),
    SharedAttention(SharedAttention),
    Latent(LatentAttention),
    State(Box<dyn StateMixer>),
    Hybrid(Hybrid),
}

#[derive(Clone, Debug)]
#[allow(clippy::large_enum_variant, reason = "there is one in each block")]
enum FeedForward {
    Dense(Mlp),
    Experts(Experts),
    Beside(Beside),
}

/// A feed-forward and a mixture of experts side by side.
#[derive(Clone, Debug)]
struct Beside {
    mlp: Mlp,
    experts: Experts,
    /// Norms of the output of the feed-forward, and of input and output of the experts.
    norms: [Norm; 3],
}

/// The input of a block that follows from the tokens and the block's number, with its projections
/// (per-layer embeddings).
#[derive(Clone, Debug)]
struct PerLayerInput {
    gate: Linear,
    activation: Activation,
    projection: Linear,
    norm: Norm,
}

/// Attention to the output of an encoder, with its norm.
#[derive(Clone, Debug)]
struct NormedCrossAttention {
    norm: Norm,
    attention: CrossAttention,
}

/// A feed-forward with its norms.
#[derive(Clone, Debug)]
struct NormedFeedForward {
    input_norm: Option<Norm>,
    feed_forward: FeedForward,
    /// Norm of the feed-forward's output, for models with norms after.
    norm: Option<Norm>,
}

#[derive(Clone, Debug)]
pub(crate) struct Block {
    input_norm: Option<Norm>,
    /// `None` if the block is only a feed-forward.
    mixer: Option<Mixer>,
    /// Norm of the mixer's output, for models with norms after.
    mixer_norm: Option<Norm>,
    cross_attention: Option<NormedCrossAttention>,
    feed_forward: Option<NormedFeedForward>,
    /// Whether the feed-forward takes the input of the mixer, instead of its output.
    is_parallel: bool,
    residual_scale: Option<f64>,
    /// Whether norms after mixer and feed-forward are those of the sums with the residual.
    norms_sums: bool,
    per_layer: Option<PerLayerInput>,
    /// Factor of the output, `[1, 1, 1]`.
    scalar: Option<Tensor<3>>,
}

impl Block {
    /// Reads the weights of block `name`.
    pub(crate) fn load(
        weights: &mut dyn Weights,
        name: &str,
        block: &BlockConfig,
        config: &DecoderConfig,
    ) -> Result<Self> {
        let norm = |weights: &mut dyn Weights, part: Option<&str>| {
            let load =
                |part| Norm::load(weights, &format!("{name}.{part}"), config.sizes.hidden, config.norm);
            part.map(load).transpose()
        };
        let NormNames { before_mixer, after_mixer, before_feed_forward, after_feed_forward } =
            config.names.norms;
        let attention_name = format!("{name}.{}", config.names.attention);
        let state_name = format!("{name}.{}", config.names.state_space);
        let feed_forward_name = format!("{name}.{}", config.names.feed_forward);
        let has_mixer = !matches!(block.mixer, MixerConfig::Nothing);
        let input_norm = norm(weights, before_mixer.filter(|_| has_mixer))?;
        let dtype = input_norm.as_ref().map_or(DType::F32, Norm::dtype);
        Ok(Self {
            mixer_norm: norm(weights, after_mixer.filter(|_| has_mixer))?,
            mixer: match block.mixer {
                MixerConfig::Attention(attention) => Some(Mixer::Attention(Attention::load(
                    weights,
                    &attention_name,
                    &attention,
                    config.norm,
                )?)),
                MixerConfig::SharedAttention(attention) => {
                    let attention = SharedAttention::load(weights, &attention_name, &attention, config.norm)?;
                    Some(Mixer::SharedAttention(attention))
                }
                MixerConfig::Latent(latent) => {
                    Some(Mixer::Latent(LatentAttention::load(weights, &attention_name, latent)?))
                }
                MixerConfig::State(state) => Some(Mixer::State(state.load(weights, &state_name, dtype)?)),
                MixerConfig::Hybrid(hybrid) => {
                    let names = [&*attention_name, &*state_name];
                    Some(Mixer::Hybrid(Hybrid::load(weights, names, &hybrid, config.norm, dtype)?))
                }
                MixerConfig::Nothing => None,
            },
            cross_attention: match block.attention_config().filter(|attention| attention.cross_attention) {
                None => None,
                Some(attention) => {
                    let norm = norm(weights, Some("encoder_attn_layer_norm"))?;
                    let attention =
                        CrossAttention::load(weights, &format!("{name}.encoder_attn"), attention)?;
                    norm.map(|norm| NormedCrossAttention { norm, attention })
                }
            },
            feed_forward: match block.feed_forward {
                None => None,
                Some(feed_forward) => Some(NormedFeedForward {
                    norm: norm(weights, after_feed_forward)?,
                    input_norm: norm(weights, before_feed_forward)?,
                    feed_forward: match feed_forward {
                        FeedForwardConfig::Gated => {
                            FeedForward::Dense(Mlp::gated(weights, &feed_forward_name, &config.mlp)?)
                        }
                        FeedForwardConfig::GatedOf(intermediate) => {
                            let mlp = MlpConfig { intermediate, ..config.mlp };
                            FeedForward::Dense(Mlp::gated(weights, &feed_forward_name, &mlp)?)
                        }
                        FeedForwardConfig::Beside(experts, intermediate) => {
                            let mlp = MlpConfig { intermediate, ..config.mlp };
                            let mut own = |part: &str| {
                                let part = format!("{name}.{part}");
                                Norm::load(weights, &part, config.sizes.hidden, config.norm)
                            };
                            let norms = [
                                own("post_feedforward_layernorm_1")?,
                                own("pre_feedforward_layernorm_2")?,
                                own("post_feedforward_layernorm_2")?,
                            ];
                            FeedForward::Beside(Beside {
                                norms,
                                mlp: Mlp::gated(weights, &feed_forward_name, &mlp)?,
                                experts: Experts::load(weights, name, &experts, &config.mlp)?,
                            })
                        }
                        FeedForwardConfig::Experts(experts) => FeedForward::Experts(Experts::load(
                            weights,
                            &feed_forward_name,
                            &experts,
                            &config.mlp,
                        )?),
                        FeedForwardConfig::Plain(names) => {
                            let names = names.map(|part| format!("{name}.{part}"));
                            FeedForward::Dense(Mlp::plain(weights, names, &config.mlp)?)
                        }
                    },
                }),
            },
            input_norm,
            is_parallel: config.parallel,
            residual_scale: config.residual_scale,
            norms_sums: config.text_encoder.is_some(),
            per_layer: config
                .per_layer
                .map(|per_layer| {
                    let (hidden, width) = (config.sizes.hidden, per_layer.width);
                    let part = |part: &str| format!("{name}.{part}");
                    Ok::<_, kiln_core::Error>(PerLayerInput {
                        gate: Linear::load(weights, &part("per_layer_input_gate"), [hidden, width], false)?,
                        activation: config.mlp.activation,
                        projection: Linear::load(
                            weights,
                            &part("per_layer_projection"),
                            [width, hidden],
                            false,
                        )?,
                        norm: Norm::load(weights, &part("post_per_layer_input_norm"), hidden, config.norm)?,
                    })
                })
                .transpose()?,
            scalar: match config.block_scalar {
                Some(name_of_scalar) => {
                    let scalar = weights.float32(&format!("{name}.{name_of_scalar}"), &[1])?;
                    Some(scalar.reshape([1, 1, 1]))
                }
                None => None,
            },
        })
    }

    /// Applies the block to `x`. `layer` is the number of the block, which selects its memory. `per_layer` is
    /// its own input, if the model has such.
    ///
    /// # Shapes
    /// `[batch, tokens, hidden]`, unchanged; `per_layer`: `[batch, tokens, width]`.
    pub(crate) fn forward(
        &self,
        x: Tensor<3>,
        per_layer: Option<Tensor<3>>,
        layer: usize,
        places: &mut Places<'_>,
        pass: &mut Pass<'_>,
        kernels: &Kernels,
    ) -> Result<Tensor<3>> {
        let input = x.clone();
        let x = match &self.mixer {
            Some(mixer) => self.mix(mixer, x, layer, places, pass, kernels)?,
            None => x,
        };
        let x = match &self.cross_attention {
            Some(NormedCrossAttention { norm, attention }) => {
                let normed = norm.forward(x.clone(), kernels);
                attention.forward(x, normed, layer, places, pass.encoder(layer)?, kernels)?
            }
            None => x,
        };
        let input = if self.is_parallel { input } else { x.clone() };
        let x = self.feed(input, x, kernels)?;
        let x = match (&self.per_layer, per_layer) {
            (Some(PerLayerInput { gate, activation, projection, norm }), Some(own)) => {
                let gate = gate.forward(x.clone(), kernels);
                let gated = kernels.run(Gated { gate, up: own, by: (*activation).into() });
                x + norm.forward(projection.forward(gated, kernels), kernels)
            }
            _ => x,
        };
        Ok(match &self.scalar {
            Some(scalar) => {
                let scalar = scalar.clone().cast(x.dtype());
                x * scalar
            }
            None => x,
        })
    }

    /// Adds to `x` the output of the mixer, with its norms.
    fn mix(
        &self,
        mixer: &Mixer,
        x: Tensor<3>,
        layer: usize,
        places: &mut Places<'_>,
        pass: &mut Pass<'_>,
        kernels: &Kernels,
    ) -> Result<Tensor<3>> {
        let dtype = self.input_norm.as_ref().map_or(x.dtype(), Norm::dtype);
        let normed = Normed { norm: self.input_norm.as_ref(), x: x.clone().cast(dtype) };
        let mix = |residual| match mixer {
            Mixer::Attention(attention) => {
                attention.forward(residual, normed, places, pass.keys(layer)?, kernels)
            }
            Mixer::SharedAttention(attention) => attention.forward(residual, normed, places, kernels),
            Mixer::Latent(attention) => {
                attention.forward(residual, normed, places, pass.keys(layer)?, kernels)
            }
            Mixer::Hybrid(hybrid) => hybrid.forward(residual, normed, layer, places, pass, kernels),
            Mixer::State(state) => {
                state.forward(residual, normed.compute(kernels), places, pass.recurrent(layer)?, kernels)
            }
        };
        match &self.mixer_norm {
            None if x.dtype() == dtype && self.residual_scale.is_none() => mix(Some(x)),
            None => Ok(self.scaled(mix(None)?.cast(x.dtype())) + x),
            Some(norm) if self.norms_sums => Ok(norm.forward(mix(Some(x))?, kernels)),
            Some(norm) => Ok(x + self.scaled(norm.forward(mix(None)?, kernels))),
        }
    }

    /// Multiplies the output of a half of the block by the factor of the model.
    fn scaled(&self, x: Tensor<3>) -> Tensor<3> {
        let dtype = x.dtype();
        match self.residual_scale {
            Some(scale) => (x.cast(DType::F32) * scale).cast(dtype),
            None => x,
        }
    }

    /// Applies a block of an encoder to `x`: every token sees all others, and nothing is cached.
    ///
    /// # Shapes
    /// `[batch, tokens, hidden]`, unchanged.
    pub(crate) fn encode(&self, x: Tensor<3>, kernels: &Kernels) -> Result<Tensor<3>> {
        let normed = Normed { norm: self.input_norm.as_ref(), x: x.clone() }.compute(kernels);
        let x = match &self.mixer {
            Some(Mixer::Attention(attention)) => attention.encode(x, normed, kernels),
            _ => unreachable!("an encoder has attention"),
        };
        self.feed(x.clone(), x, kernels)
    }

    /// Stores the keys and values that the block computes from the encoder's output
    /// `[rows, positions, hidden]`.
    pub(crate) fn condition(
        &self,
        encoded: &Tensor<3>,
        layer: usize,
        pass: &mut Pass<'_>,
        kernels: &Kernels,
    ) -> Result<()> {
        let Some(NormedCrossAttention { attention, .. }) = &self.cross_attention else { return Ok(()) };
        let (keys, values) = attention.keys_values(encoded.clone(), kernels);
        for part in pass.encoder(layer)? {
            let own = |x: &Tensor<4>| x.clone().narrow(0, part.rows.start, part.rows.len());
            part.layer.fill(own(&keys), own(&values))?;
        }
        Ok(())
    }

    /// Adds to `x` the feed-forward of `input`, with its norms.
    fn feed(&self, input: Tensor<3>, x: Tensor<3>, kernels: &Kernels) -> Result<Tensor<3>> {
        let Some(NormedFeedForward { input_norm, feed_forward, norm }) = &self.feed_forward else {
            return Ok(x);
        };
        let shared = self.input_norm.as_ref().filter(|_| self.is_parallel);
        let normed = Normed { norm: input_norm.as_ref().or(shared), x: input };
        let feed = |residual| match feed_forward {
            FeedForward::Dense(mlp) => Ok(mlp.forward_normed(residual, normed, kernels)),
            FeedForward::Experts(experts) => {
                let x = normed.compute(kernels);
                experts.forward(residual, x.clone(), x, kernels)
            }
            FeedForward::Beside(Beside { mlp, experts, norms: [of_mlp, before, after] }) => {
                let unnormed = normed.x.clone();
                let dense = of_mlp.forward(mlp.forward_normed(None, normed, kernels), kernels);
                let x = before.forward(unnormed.clone(), kernels);
                let sparse = after.forward(experts.forward(None, unnormed, x, kernels)?, kernels);
                let both = dense + sparse;
                Ok(match residual {
                    Some(residual) => residual + both,
                    None => both,
                })
            }
        };
        match norm {
            None if self.residual_scale.is_none() => feed(Some(x)),
            None => Ok(self.scaled(feed(None)?) + x),
            Some(norm) if self.norms_sums => Ok(norm.forward(feed(Some(x))?, kernels)),
            Some(norm) => Ok(x + self.scaled(norm.forward(feed(None)?, kernels))),
        }
    }

    /// The projections that an adapter may change.
    pub(crate) fn linears(&mut self) -> Vec<&mut Linear> {
        let mixer = match &mut self.mixer {
            Some(Mixer::Attention(attention)) => attention.linears(),
            Some(Mixer::SharedAttention(attention)) => attention.linears(),
            Some(Mixer::Latent(attention)) => attention.linears(),
            Some(Mixer::State(state)) => state.linears(),
            Some(Mixer::Hybrid(hybrid)) => hybrid.linears(),
            None => Vec::new(),
        };
        let cross_attention = self.cross_attention.iter_mut().flat_map(|cross| cross.attention.linears());
        let feed_forward = self.feed_forward.iter_mut().flat_map(|normed| match &mut normed.feed_forward {
            FeedForward::Dense(mlp) => mlp.linears(),
            FeedForward::Experts(experts) => experts.linears(),
            FeedForward::Beside(Beside { mlp, experts, .. }) => {
                mlp.linears().into_iter().chain(experts.linears()).collect()
            }
        });
        let per_layer = self.per_layer.iter_mut().flat_map(|own| [&mut own.gate, &mut own.projection]);
        mixer.into_iter().chain(cross_attention).chain(feed_forward).chain(per_layer).collect()
    }

    /// Returns the size of the weights in bytes.
    pub(crate) fn bytes(&self) -> WeightBytes {
        let norms = self.input_norm.iter().chain(&self.mixer_norm);
        let mixer = match &self.mixer {
            Some(Mixer::Attention(attention)) => attention.bytes(),
            Some(Mixer::SharedAttention(attention)) => attention.bytes(),
            Some(Mixer::Latent(attention)) => attention.bytes(),
            Some(Mixer::State(state)) => state.bytes(),
            Some(Mixer::Hybrid(hybrid)) => hybrid.bytes(),
            None => 0,
        };
        let cross = |cross: &NormedCrossAttention| cross.norm.bytes() + cross.attention.bytes();
        let cross_attention = self.cross_attention.as_ref().map_or(0, cross);
        let feed_forward = self.feed_forward.as_ref().map_or(0, NormedFeedForward::bytes);
        let per_layer =
            self.per_layer.as_ref().map_or(0, |PerLayerInput { gate, projection, norm, .. }| {
                gate.bytes() + projection.bytes() + norm.bytes()
            });
        let all = norms.map(Norm::bytes).sum::<usize>() + mixer + cross_attention + feed_forward + per_layer;
        let in_host_memory = self.experts().map_or(0, Experts::host_bytes);
        let idle = self.experts().map_or(0, Experts::idle_bytes);
        WeightBytes { held: all - in_host_memory, in_host_memory, multiplied: all - idle }
    }

    /// Returns the transfer statistics of experts in host memory; `None` if there are none.
    pub(crate) fn expert_traffic(&self) -> Option<ExpertTraffic> {
        self.experts()?.traffic()
    }

    /// Whether experts are not on the device of the block.
    pub(crate) fn has_experts_away(&self) -> bool {
        self.experts().is_some_and(|experts| experts.host_bytes() > 0)
    }

    fn experts(&self) -> Option<&Experts> {
        match &self.feed_forward.as_ref()?.feed_forward {
            FeedForward::Experts(experts) => Some(experts),
            FeedForward::Beside(beside) => Some(&beside.experts),
            FeedForward::Dense(_) => None,
        }
    }
}

impl NormedFeedForward {
    fn bytes(&self) -> usize {
        let norms = self.input_norm.iter().chain(&self.norm);
        let feed_forward = match &self.feed_forward {
            FeedForward::Dense(mlp) => mlp.bytes(),
            FeedForward::Beside(Beside { mlp, experts, norms }) => {
                mlp.bytes() + experts.bytes() + norms.iter().map(Norm::bytes).sum::<usize>()
            }
            FeedForward::Experts(experts) => experts.bytes(),
        };
        norms.map(Norm::bytes).sum::<usize>() + feed_forward
    }
}
