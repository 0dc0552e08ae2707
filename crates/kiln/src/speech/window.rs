//! Decoding windows as a batch, and again if they fail the thresholds.

use burn::tensor::{Tensor, TensorData};
use flate2::{Compression, write::ZlibEncoder};
use kiln_core::{
    Result,
    batch::Batch,
    model::{Logits, TokenId},
    model_cache::ModelCache,
    read_back,
};
use kiln_generate::GenerationConfig;

use super::{SpeechConfig, Transcriber, rules::TimestampRules, words};

/// A window to decode.
#[derive(Debug)]
pub(super) struct Unheard {
    pub(super) recording: usize,
    /// `[bins, frames]`
    pub(super) features: Vec<f32>,
    /// Frames to the end of the last window, and to the end of the recording.
    pub(super) frames: usize,
    pub(super) heard: usize,
    /// Tokens before those of the window.
    pub(super) before: Vec<TokenId>,
    pub(super) language: Option<(TokenId, &'static str)>,
}

/// A decoded window.
#[derive(Clone, Debug)]
pub(super) struct Decoded {
    pub(super) recording: usize,
    pub(super) frames: usize,
    pub(super) heard: usize,
    pub(super) language: Option<(TokenId, &'static str)>,
    /// Tokens without the end token.
    pub(super) tokens: Vec<TokenId>,
    /// The frame at which each token begins.
    pub(super) beginnings: Option<Vec<usize>>,
    pub(super) temperature: f32,
    pub(super) avg_logprob: f32,
    pub(super) compression_ratio: f32,
    pub(super) no_speech_prob: Option<f32>,
    /// Whether the window has no speech.
    pub(super) is_unspoken: bool,
}

/// The result of a row at one temperature.
struct Attempt {
    /// Tokens with the end token, if there is one.
    tokens: Vec<TokenId>,
    avg_logprob: f32,
}

impl Transcriber {
    /// Decodes each window. `cache` is reset and used for it.
    pub(super) async fn decode(&self, windows: &[Unheard], cache: &mut ModelCache) -> Result<Vec<Decoded>> {
        cache.reset();
        let device = self.model.device();
        let (bins, frames) = (self.mel.bins(), self.window);
        let features: Vec<f32> = windows.iter().flat_map(|window| &window.features).copied().collect();
        let features = Tensor::from_data(TensorData::new(features, [windows.len(), bins, frames]), device);

        // This pass runs the encoder, and the tokens up to the one that begins the transcript: the logits
        // after that token give the language, and the probability of no speech.
        let mut languages: Vec<_> = windows.iter().map(|window| window.language).collect();
        let detects = self.tokens.is_multilingual && languages.iter().any(Option::is_none);
        let beginning = |window: &Unheard| match detects {
            true => vec![self.tokens.start],
            false => [&window.before[..], &[self.tokens.start]].concat(),
        };
        let beginnings: Vec<Vec<TokenId>> = windows.iter().map(beginning).collect();
        let batch = Batch::ragged(&beginnings, self.tokens.eos, device)?;
        let batch = Batch { features: Some(features), ..batch };
        let logits = self.model.causal().forward(&batch, Logits::Last, cache)?;
        let logits: Vec<f32> = read_back::start(logits).finish().await?.iter().collect();
        let rows: Vec<&[f32]> = logits.chunks_exact(self.model.sizes().vocab).collect();
        for (language, scores) in languages.iter_mut().zip(&rows).filter(|_| detects) {
            *language = language.or_else(|| self.detected(scores));
        }
        let no_speech = |scores: &&[f32]| probability(scores, self.tokens.no_speech);
        let no_speech: Vec<f32> = rows.iter().map(no_speech).collect();

        let mut prompts = Vec::with_capacity(windows.len());
        for (window, language) in windows.iter().zip(&languages) {
            let mut prompt = [&window.before[..], &[self.tokens.start]].concat();
            prompt.extend(language.map(|(id, _)| id));
            if language.is_some() {
                prompt.extend(self.tokens.task(self.task)?);
            }
            if !self.has_timestamps {
                prompt.push(self.tokens.no_timestamps);
            }
            prompts.push(prompt);
        }

        let whole = cache.snapshot();
        let mut decoded: Vec<Option<Decoded>> = vec![None; windows.len()];
        let mut left: Vec<usize> = (0..windows.len()).collect();
        for (i, &temperature) in self.temperatures.iter().enumerate() {
            let of_left: Vec<Vec<TokenId>> = left.iter().map(|&row| prompts[row].clone()).collect();
            let mut own = whole.snapshot();
            own.truncate(0)?;
            own.reorder(&left)?;
            let attempts = self.attempt(&of_left, temperature, &mut own).await?;
            let is_last = i + 1 == self.temperatures.len();
            let mut failed = Vec::new();
            for (&row, Attempt { mut tokens, avg_logprob }) in left.iter().zip(attempts) {
                let compression_ratio = self.compression_ratio(&tokens);
                let repeats = self.compression_ratio_threshold.is_some_and(|most| compression_ratio > most);
                let is_unlikely = self.logprob_threshold.is_some_and(|least| avg_logprob < least);
                let is_silent = self.no_speech_threshold.is_some_and(|most| no_speech[row] > most);
                // Text of only dots and notes is not speech either, unless it is likely and the window has
                // speech.
                let says_nothing =
                    || self.text(&tokens).is_ok_and(|text| !text.contains(char::is_alphanumeric));
                let is_unspoken = match is_silent {
                    true => is_unlikely || says_nothing(),
                    false => is_unlikely && is_last && says_nothing(),
                };
                if (repeats || is_unlikely) && !is_unspoken && !is_last {
                    failed.push(row);
                    continue;
                }
                tokens.pop_if(|token| *token == self.tokens.eos);
                let window = &windows[row];
                decoded[row] = Some(Decoded {
                    recording: window.recording,
                    frames: window.frames,
                    heard: window.heard,
                    language: languages[row],
                    beginnings: None,
                    tokens,
                    temperature,
                    avg_logprob,
                    compression_ratio,
                    no_speech_prob: self.no_speech_threshold.map(|_| no_speech[row]),
                    is_unspoken,
                });
            }
            left = failed;
            if left.is_empty() {
                break;
            }
        }
        let mut decoded: Vec<Decoded> = decoded.into_iter().flatten().collect();
        if self.has_word_times {
            for (row, decoded) in decoded.iter_mut().enumerate().filter(|(_, decoded)| !decoded.is_unspoken) {
                let mut own = whole.snapshot();
                own.truncate(0)?;
                own.reorder(&[row])?;
                decoded.beginnings = Some(self.beginnings(&prompts[row], decoded, &mut own).await?);
            }
        }
        Ok(decoded)
    }

    /// The likeliest language after the token that begins a transcript.
    fn detected(&self, scores: &[f32]) -> Option<(TokenId, &'static str)> {
        let languages = self.tokens.languages.iter();
        let likeliest = languages.max_by(|a, b| scores[*a.1 as usize].total_cmp(&scores[*b.1 as usize]))?;
        self.tokens.language(likeliest.0.trim_matches(['<', '|', '>'])).ok()
    }

    /// Decodes rows once. `cache` holds the encoder's output, and no tokens.
    async fn attempt(
        &self,
        prompts: &[Vec<TokenId>],
        temperature: f32,
        cache: &mut ModelCache,
    ) -> Result<Vec<Attempt>> {
        let longest = prompts.iter().map(Vec::len).max().unwrap_or(0);
        let room = self.model.sizes().positions.saturating_sub(longest).max(1);
        let mut config =
            GenerationConfig::new().max_new_tokens(room).seed(self.seed).eos_token_id(vec![self.tokens.eos]);
        config = config.num_beams(if temperature > 0.0 { 1 } else { self.num_beams });
        let mut request = self
            .model
            .generate(prompts.to_vec())
            .config(config)
            .temperature(temperature)
            .cache(cache)
            .on_oom(self.on_oom)
            .compile(self.compile);
        if self.has_timestamps {
            request = request.processor(TimestampRules { tokens: self.tokens.clone() });
        }
        if temperature == 0.0 && self.num_beams > 1 {
            let best = |mut all: Vec<kiln_generate::Completion>| {
                let best = if all.is_empty() { Default::default() } else { all.swap_remove(0) };
                let mean = best.token_scores.iter().sum::<f32>() / best.tokens.len().max(1) as f32;
                Attempt { tokens: best.tokens, avg_logprob: mean }
            };
            let mut steps = request.steps()?;
            while let Some(step) = steps.next_step().await {
                step?;
            }
            return Ok(steps.completions()?.into_iter().map(best).collect());
        }
        let wants_scores = self.logprob_threshold.is_some() || self.no_speech_threshold.is_some();
        let mut attempts: Vec<(Vec<TokenId>, f32)> = vec![(Vec::new(), 0.0); prompts.len()];
        let mut steps = request.keep_scores(wants_scores).steps()?;
        while let Some(step) = steps.next_step().await {
            let step = step?;
            for (row, (tokens, sum)) in attempts.iter_mut().enumerate() {
                let Some(token) = step.tokens[row] else { continue };
                tokens.push(token);
                if let Some(scores) = step.scores.as_ref().map(|scores| &scores[row]) {
                    let scale = if temperature > 0.0 { temperature } else { 1.0 };
                    *sum += log_probability(scores, token, scale);
                }
            }
        }
        let mean = |(tokens, sum): (Vec<TokenId>, f32)| {
            let avg_logprob = sum / tokens.len().max(1) as f32;
            Attempt { tokens, avg_logprob }
        };
        Ok(attempts.into_iter().map(mean).collect())
    }

    /// The bytes of tokens divided by their size when compressed by zlib.
    fn compression_ratio(&self, tokens: &[TokenId]) -> f32 {
        let bits = (self.model.sizes().vocab as f64).log2();
        let length = (bits / 8.0) as usize + 1;
        let bytes: Vec<u8> =
            tokens.iter().flat_map(|token| token.to_le_bytes().into_iter().take(length)).collect();
        let mut encoder = ZlibEncoder::new(Vec::new(), Compression::default());
        let compressed = std::io::Write::write_all(&mut encoder, &bytes).and_then(|()| encoder.finish());
        compressed.map_or(1.0, |compressed| bytes.len() as f32 / compressed.len().max(1) as f32)
    }

    /// The frames at which tokens begin. `cache` holds the encoder's output for the window, and no tokens.
    async fn beginnings(
        &self,
        prompt: &[TokenId],
        decoded: &Decoded,
        cache: &mut ModelCache,
    ) -> Result<Vec<usize>> {
        let (tokens, heads) = (&decoded.tokens, self.alignment_heads().unwrap_or_default());
        if tokens.is_empty() {
            return Ok(Vec::new());
        }
        let batch = Batch::from_rows(&[[prompt, tokens].concat()], self.model.device())?;
        let attention = self.model.causal().forward(&batch, Logits::Alignment(heads), cache)?;
        let [heads, all, positions] = attention.dims();
        let own = attention.narrow(1, prompt.len(), all - prompt.len());
        let own: Vec<f32> = read_back::start(own).finish().await?.iter().collect();
        let filter_width = self.model.speech().map_or(1, SpeechConfig::filter_width);
        // A position of the encoder is two frames.
        let heard = decoded.heard.min(decoded.frames) / 2;
        Ok(words::beginnings(&own, [heads, tokens.len(), positions], heard, filter_width))
    }
}

/// `softmax(scores)[token]`
fn probability(scores: &[f32], token: TokenId) -> f32 {
    log_probability(scores, token, 1.0).exp()
}

/// `log_softmax(scale · scores)[token]`
fn log_probability(scores: &[f32], token: TokenId, scale: f32) -> f32 {
    let largest = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max) * scale;
    let sum: f64 = scores.iter().map(|score| f64::from(score * scale - largest).exp()).sum();
    scores.get(token as usize).map_or(f32::NEG_INFINITY, |score| score * scale - largest - sum.ln() as f32)
}
