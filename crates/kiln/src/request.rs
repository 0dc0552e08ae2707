//! A request to generate: a prompt, settings, and the cache that is used.

mod prompt;
mod start;

use std::sync::Arc;

use burn::tensor::Tensor;
use kiln_cache::Plan;
use kiln_core::{Error, Result, model::TokenId};
use kiln_generate::{
    AllowedTokens, CacheHandle, Completion, GenerationConfig, Grammar, Options, Processor, RowState,
    StoppingCriterion, TextStream,
};

pub use self::prompt::Prompt;
use crate::{
    GeneratedText, Model, OnOutOfMemory,
    chat::{Answer, Ending},
    sequence::{Reuse, Sequence, Steps},
};

/// The memory of the sequence.
#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "there is one in each request")]
enum Memory<'a> {
    /// A cache that ends with the generation. `None`: the kind that the folder asks for.
    Own(Option<Plan>),
    Cache(CacheHandle<'a>),
    Sequence(&'a mut Sequence),
}

/// A request to generate, made by [`Model::generate`] or [`Chat::say`](crate::Chat::say), and run by
/// [`text`](Self::text), [`stream`](Self::stream), [`steps`](Self::steps) or [`prefill`](Self::prefill).
///
/// Settings that are not given come from the folder's `generation_config.json`, then from the defaults of
/// Transformers.
///
/// A request holds its model. It borrows only a cache, a sequence or a chat that it is lent; without one it
/// is `'static`, as what it generates is, and can be moved to another thread or kept in a struct.
#[derive(Debug)]
#[must_use = "nothing is generated before `text`, `stream` or `steps`"]
pub struct Request<'a> {
    model: Model,
    prompt: Prompt,
    config: GenerationConfig,
    memory: Memory<'a>,
    draft: Option<Model>,
    /// The options that were given; the settings are made from `config` when the request runs.
    options: Options,
    on_oom: OnOutOfMemory,
    processors: Vec<Arc<dyn Processor>>,
    allowed_tokens: Option<AllowedTokens>,
    grammar: Option<Grammar>,
    /// The end of the text, if it is an answer in a conversation.
    ending: Option<Ending>,
    /// The answer of a conversation that the text is added to.
    answer: Option<Answer<'a>>,
    /// The prompts that guidance moves away from.
    negative_prompt: Option<Prompt>,
    /// The input of the model's encoder.
    features: Option<Tensor<3>>,
    /// Number of the likeliest tokens whose log-probabilities a text tells.
    logprobs: Option<usize>,
    /// Whether the names of special tokens are part of a text.
    special_tokens: bool,
}

impl<'a> Request<'a> {
    pub(crate) fn new(model: Model, prompt: Prompt) -> Self {
        Self {
            model,
            prompt,
            config: GenerationConfig::default(),
            memory: Memory::Own(None),
            draft: None,
            options: Options { compile: true, fast_forward: true, ..Options::default() },
            on_oom: OnOutOfMemory::default(),
            processors: Vec::new(),
            allowed_tokens: None,
            grammar: None,
            ending: None,
            answer: None,
            negative_prompt: None,
            features: None,
            logprobs: None,
            special_tokens: false,
        }
    }

    pub(crate) fn ending(self, ending: Ending) -> Self {
        Self { ending: Some(ending), ..self }
    }

    pub(crate) fn answering(self, answer: Answer<'a>) -> Self {
        Self { answer: Some(answer), ..self }
    }

    /// The most tokens that are generated for each row. Default: until the text ends, or the positions of the
    /// model do.
    pub fn max_new_tokens(mut self, tokens: usize) -> Self {
        self.config.max_new_tokens = Some(tokens);
        self
    }

    /// The input of the encoder of the model, `[rows, bins, frames]`, as [`CausalModel::features`] says, with
    /// one row for each prompt. For speech, [`Transcriber`](crate::Transcriber) makes it. A cache that holds
    /// the output of the encoder needs no input.
    ///
    /// [`CausalModel::features`]: crate::expert::CausalModel::features
    #[doc(alias = "input_features")]
    pub fn features(self, features: Tensor<3>) -> Self {
        Self { features: Some(features), ..self }
    }

    /// Samples tokens at this temperature; 0 takes the likeliest token each time.
    pub fn temperature(mut self, temperature: f32) -> Self {
        self.config.do_sample = Some(temperature > 0.0);
        self.config.temperature = Some(temperature);
        self
    }

    /// The seed of the sampler: the same seed gives the same tokens. Default: a new seed for each request.
    pub fn seed(mut self, seed: u64) -> Self {
        self.config.seed = Some(seed);
        self
    }

    /// Follows this many sequences at once, and returns the likeliest (beam search).
    pub fn num_beams(mut self, beams: usize) -> Self {
        self.config.num_beams = Some(beams);
        self
    }

    /// Returns this many sequences for each prompt, with beams or sampling: see
    /// [`completions`](Self::completions).
    pub fn num_return_sequences(mut self, sequences: usize) -> Self {
        self.config.num_return_sequences = Some(sequences);
        self
    }

    /// Moves the text away from the one that follows this prompt (classifier-free guidance), by
    /// `guidance_scale`. Several prompts each have their own, or share one. Default: the last token of the
    /// prompt.
    ///
    /// ```
    /// # let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets/demo");
    /// use kiln::{GenerationConfig, Model};
    ///
    /// let model = Model::load(folder)?;
    /// let settings = GenerationConfig::new().guidance_scale(3.0).max_new_tokens(8);
    /// let text = model.generate("The Constitution").negative_prompt("ROMEO:").config(settings).text()?;
    /// assert!(!text.is_empty());
    /// # Ok::<(), kiln::Error>(())
    /// ```
    pub fn negative_prompt(mut self, prompt: impl Into<Prompt>) -> Self {
        self.negative_prompt = Some(prompt.into());
        self
    }

    /// Adds a smaller model that drafts tokens, which this one verifies many at a time. The tokens are those
    /// that it would choose alone; they come faster if most drafts are right. If the smaller model has
    /// another tokenizer, drafts are translated as text.
    ///
    /// ```
    /// # let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets/demo");
    /// # let smaller = folder;
    /// use kiln::{GenerationConfig, Model};
    ///
    /// let (model, draft) = (Model::load(folder)?, Model::load(smaller)?);
    /// let request = || model.generate("The Constitution").max_new_tokens(12).temperature(0.0);
    /// assert_eq!(request().draft(&draft).text()?, request().text()?);
    /// // Without a second model: what followed the same tokens before.
    /// let lookup = GenerationConfig::new().prompt_lookup_num_tokens(4);
    /// assert_eq!(request().config(lookup).text()?, request().text()?);
    /// # Ok::<(), kiln::Error>(())
    /// ```
    #[doc(alias = "assistant_model")]
    pub fn draft(self, draft: &Model) -> Self {
        Self { draft: Some(draft.clone()), ..self }
    }

    /// Any settings of the generation. Absent ones stay as they are.
    pub fn config(mut self, config: GenerationConfig) -> Self {
        self.config = config.merged_over(&self.config);
        self
    }

    /// Adds a custom processor, which changes the scores of each token before it is chosen, on the host. It
    /// runs after the processors of the settings, and before those that only apply to sampling (temperature,
    /// `top_k` and so on).
    ///
    /// ```
    /// # let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets/demo");
    /// use kiln::{Model, Processor, RowState};
    ///
    /// /// Even tokens only.
    /// #[derive(Debug)]
    /// struct Even;
    ///
    /// impl Processor for Even {
    ///     fn apply(&self, _row: &RowState<'_>, scores: &mut [f32]) {
    ///         scores.iter_mut().skip(1).step_by(2).for_each(|score| *score = f32::NEG_INFINITY);
    ///     }
    /// }
    ///
    /// let model = Model::load(folder)?;
    /// for step in model.generate("The Constitution").max_new_tokens(3).processor(Even).steps()? {
    ///     assert!(step?.tokens[0].is_some_and(|token| token % 2 == 0));
    /// }
    /// # Ok::<(), kiln::Error>(())
    /// ```
    pub fn processor(mut self, processor: impl Processor + 'static) -> Self {
        self.processors.push(Arc::new(processor));
        self
    }

    /// Chooses only tokens that `allowed` names: Transformers' `prefix_allowed_tokens_fn`. It is called
    /// before each token of each row, and applies after `min_new_tokens` and before forced tokens. The last
    /// call counts.
    ///
    /// The generation ends with [`Error::Setting`] if no token is allowed, or one that is not in the
    /// vocabulary. If settings removed all allowed tokens, these are equally likely.
    ///
    /// ```
    /// # let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets/demo");
    /// use kiln::Model;
    ///
    /// let model = Model::load(folder)?;
    /// // A row that begins with a name goes on with it; then anything may follow.
    /// let (name, vocab) = (model.encode_more(" Juliet")?, model.sizes().vocab as u32);
    /// let goes_on = name.clone();
    /// let steps = model.generate("ROMEO and").max_new_tokens(6).temperature(0.0);
    /// let mut steps = steps
    ///     .allowed_tokens(move |row| match goes_on.get(row.generated) {
    ///         Some(&next) => vec![next],
    ///         None => (0..vocab).collect(),
    ///     })
    ///     .steps()?;
    /// steps.by_ref().try_for_each(|step| step.map(drop))?;
    /// let prompt = model.encode("ROMEO and")?.len();
    /// assert!(steps.tokens(0).is_some_and(|tokens| tokens[prompt..].starts_with(&name)));
    /// # Ok::<(), kiln::Error>(())
    /// ```
    #[doc(alias = "prefix_allowed_tokens_fn")]
    pub fn allowed_tokens(
        mut self,
        allowed: impl Fn(&RowState<'_>) -> Vec<TokenId> + Send + Sync + 'static,
    ) -> Self {
        self.allowed_tokens = Some(AllowedTokens::new(allowed));
        self
    }

    /// Generates only text that matches a grammar: a JSON schema, a regular expression or a Lark grammar. A
    /// tokenizer is needed, and a token that ends the text. A text that is cut off (`max_new_tokens`) is the
    /// beginning of one that matches.
    ///
    /// ```
    /// # let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets/demo");
    /// use kiln::{Grammar, Model};
    ///
    /// let model = Model::load(folder)?;
    /// let date = Grammar::regex("[0-9]{4}-[0-9]{2}")?;
    /// let text = model.generate("The date is ").grammar(date).seed(1).text()?;
    /// assert_eq!(text.len(), 7);
    /// # Ok::<(), kiln::Error>(())
    /// ```
    pub fn grammar(mut self, grammar: impl Into<Option<Grammar>>) -> Self {
        self.grammar = grammar.into();
        self
    }

    /// Ends a row after a token for which `ends` returns true. It is called after each token of each row.
    ///
    /// ```
    /// # let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets/demo");
    /// use kiln::{Model, StopReason};
    ///
    /// let model = Model::load(folder)?;
    /// let mut steps =
    ///     model.generate("The Constitution").stop_when(|row| row.ids.len() == 5).temperature(0.0).steps()?;
    /// steps.by_ref().try_for_each(|step| step.map(drop))?;
    /// assert_eq!(steps.stop_reason(0), Some(StopReason::Criterion));
    /// assert_eq!(steps.tokens(0).map(<[_]>::len), Some(5));
    /// # Ok::<(), kiln::Error>(())
    /// ```
    pub fn stop_when(mut self, ends: impl Fn(&RowState<'_>) -> bool + Send + Sync + 'static) -> Self {
        self.options.stopping_criteria.push(StoppingCriterion::new(ends));
        self
    }

    /// The kind of cache that the generation creates. Default: the one that the folder asks for, else
    /// `dynamic`.
    pub fn plan(self, plan: Plan) -> Self {
        Self { memory: Memory::Own(Some(plan)), ..self }
    }

    /// Uses this cache, lent (`&mut cache`) or given away. If it holds tokens, the prompt follows them.
    ///
    /// Afterwards the cache holds all tokens but the last, which was never fed.
    pub fn cache(self, cache: impl Into<CacheHandle<'a>>) -> Self {
        Self { memory: Memory::Cache(cache.into()), ..self }
    }

    /// Uses the cache of this sequence. The prompt is the whole text: the part that the sequence holds is not
    /// computed again, and everything else that it holds is forgotten ([`Sequence::rewind_to`]).
    pub fn sequence(self, sequence: &'a mut Sequence) -> Self {
        Self { memory: Memory::Sequence(sequence), ..self }
    }

    /// The answer to an error of memory. Default: layers of the cache move to host memory.
    pub fn on_oom(mut self, on_oom: OnOutOfMemory) -> Self {
        self.on_oom = on_oom;
        self
    }

    /// Number of prompt tokens of each row in a forward pass. Default: as many as activations of 32 MiB
    /// allow.
    pub fn prefill_chunk(mut self, tokens: impl Into<Option<usize>>) -> Self {
        self.options.prefill_chunk = tokens.into();
        self
    }

    /// Lets an [`Engine`](crate::Engine::with_prefixes) with prefixes begin with the cache of an earlier
    /// prompt of the same name, if both begin alike. Prompts of users who must not notice each other's, by
    /// the time that they take, have different names. Default: nothing is shared.
    ///
    /// Bits stay the same for the same [`prefill_chunk`](Self::prefill_chunk): beginnings end at multiples of
    /// it.
    pub fn prefix_scope(mut self, name: impl Into<String>) -> Self {
        self.options.prefix_scope = Some(name.into());
        self
    }

    /// Drafts up to `tokens` tokens for a pass by prompt lookup, at most 15, where that changes no token. An
    /// [`Engine`](crate::Engine) does so only while it computes nothing else. Default: none, unless the
    /// setting `prompt_lookup_num_tokens` asks for drafts in any case.
    pub fn lookup_drafts(mut self, tokens: impl Into<Option<usize>>) -> Self {
        self.options.lookup_drafts = tokens.into();
        self
    }

    /// Whether the decode step is captured once and replayed, if the device supports it. Default: true.
    pub fn compile(mut self, compile: impl Into<Option<bool>>) -> Self {
        self.options.compile = compile.into().unwrap_or(true);
        self
    }

    /// Whether tokens that a [`grammar`](Self::grammar) forces are fed in one pass, as many as change no
    /// token. Default: true, if the cache can forget them and keeps everything that the model may see.
    pub fn fast_forward(mut self, fast_forward: impl Into<Option<bool>>) -> Self {
        self.options.fast_forward = fast_forward.into().unwrap_or(true);
        self
    }

    /// Whether each step carries its logits, before processors. Default: false.
    pub fn keep_logits(mut self, keep: bool) -> Self {
        self.options.keep_logits = keep;
        self
    }

    /// Whether the names of special tokens are part of a text, except that of the token that ends it. Some
    /// models mark calls of tools by such tokens ([`AnswerFormat`](crate::AnswerFormat)). Default: false.
    #[doc(alias = "skip_special_tokens")]
    pub fn special_tokens(mut self, told: bool) -> Self {
        self.special_tokens = told;
        self
    }

    /// Lets the [tokens of a text](GeneratedText::take_tokens) have their log-probabilities, and those of the
    /// `top` likeliest tokens of each step. Default: none.
    ///
    /// ```
    /// # let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets/demo");
    /// let model = kiln::Model::load(folder)?;
    /// let mut text = model.generate("The Constitution").max_new_tokens(3).logprobs(2).temperature(0.0).stream()?;
    /// text.by_ref().try_for_each(|piece| piece.map(drop))?;
    /// for token in text.take_tokens() {
    ///     let logprobs = token.logprobs.expect("they were asked for");
    ///     // The likeliest token was chosen.
    ///     assert_eq!(logprobs.top[0], (token.id, logprobs.chosen));
    /// }
    /// # Ok::<(), kiln::Error>(())
    /// ```
    pub fn logprobs(mut self, top: impl Into<Option<usize>>) -> Self {
        self.logprobs = top.into();
        self.options.keep_logits |= self.logprobs.is_some();
        self
    }

    /// Lets the [tokens of the prompt](GeneratedText::take_prompt_tokens) have their log-probabilities, and
    /// those of the `top` likeliest tokens at each place. The prompt is then computed as a whole. Default:
    /// none.
    ///
    /// ```
    /// # let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets/demo");
    /// let model = kiln::Model::load(folder)?;
    /// let mut text = model.generate("The Constitution").max_new_tokens(1).prompt_logprobs(0).stream()?;
    /// text.by_ref().try_for_each(|piece| piece.map(drop))?;
    /// let tokens = text.take_prompt_tokens();
    /// let log_probs: Vec<f32> = tokens.iter().flat_map(|token| &token.logprobs).map(|one| one.chosen).collect();
    /// assert_eq!(log_probs.len(), tokens.len() - 1);
    /// println!("perplexity {}", (-log_probs.iter().sum::<f32>() / log_probs.len() as f32).exp());
    /// # Ok::<(), kiln::Error>(())
    /// ```
    pub fn prompt_logprobs(mut self, top: impl Into<Option<usize>>) -> Self {
        self.options.prompt_logprobs = top.into();
        self
    }

    /// Whether each step carries its scores: the logits after all processors. Default: false.
    pub fn keep_scores(mut self, keep: bool) -> Self {
        self.options.keep_scores = keep;
        self
    }

    /// Generates the whole text that follows the prompt.
    ///
    /// ```
    /// # let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets/demo");
    /// let model = kiln::Model::load(folder)?;
    /// let text = model.generate("The Constitution").max_new_tokens(8).temperature(0.0).text()?;
    /// assert!(!text.is_empty());
    /// # Ok::<(), kiln::Error>(())
    /// ```
    ///
    /// # Errors
    /// The errors of [`stream`](Self::stream), and of each step.
    pub fn text(self) -> Result<String> {
        self.stream()?.collect()
    }

    /// Generates the text that follows the prompt, piece by piece. Stop strings end it. With beam search, a
    /// piece comes once all beams agree on it.
    ///
    /// # Errors
    /// The errors of [`steps`](Self::steps); [`Error::Prompt`] for several prompts and for a model without a
    /// tokenizer; [`Error::Setting`] if several sequences are to be returned.
    pub fn stream(self) -> Result<GeneratedText<'a>> {
        let tokenizer = self.model.tokenizer()?.clone();
        if let Prompt::Batch(rows) = &self.prompt
            && rows.len() > 1
        {
            let why = format!("text is generated from one prompt, not from {}; use `steps`", rows.len());
            return Err(Error::Prompt { why });
        }
        let (logprobs, special_tokens) = (self.logprobs, self.special_tokens);
        let (steps, answer) = self.start(false)?;
        if logprobs.is_some() && steps.settings().width() > 1 {
            let why = "are told for the tokens of one sequence; leave out beams".to_owned();
            return Err(Error::Setting { name: "logprobs", why });
        }
        let returned = steps.settings().num_return_sequences();
        if returned > 1 {
            let why = format!("is {returned}, and a text is one sequence; leave it out here");
            return Err(Error::Setting { name: "num_return_sequences", why });
        }
        let stream = TextStream::after(tokenizer, steps.tokens(0).unwrap_or_default())?;
        Ok(GeneratedText::new(steps, stream, answer, logprobs)?.with_special_tokens(special_tokens))
    }

    /// Generates all sequences of each prompt: `num_return_sequences` of them, the best first if there is a
    /// beam search.
    ///
    /// ```
    /// # let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets/demo");
    /// let model = kiln::Model::load(folder)?;
    /// let request = model.generate("The Constitution").num_beams(4).num_return_sequences(2).max_new_tokens(8);
    /// for completion in &request.completions()?[0] {
    ///     println!("{:?} {}", completion.score, completion.text.as_deref().unwrap_or_default());
    /// }
    /// # Ok::<(), kiln::Error>(())
    /// ```
    ///
    /// # Errors
    /// The errors of [`steps`](Self::steps), and of each step.
    pub fn completions(self) -> Result<Vec<Vec<Completion>>> {
        let mut steps = self.steps()?;
        steps.try_for_each(|step| step.map(drop))?;
        steps.completions()
    }

    /// Generates tokens, one for each row in a step. A prompt has as many rows as beams, or as sequences to
    /// return. Nothing is added to a conversation.
    ///
    /// ```
    /// # let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets/demo");
    /// let model = kiln::Model::load(folder)?;
    /// let prompts = vec![model.encode("ROMEO:")?, model.encode("The Constitution")?];
    /// for step in model.generate(prompts).max_new_tokens(3).steps()? {
    ///     println!("{:?}", step?.tokens);
    /// }
    /// # Ok::<(), kiln::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Prompt`] for an empty prompt, ids outside the vocabulary and a prompt longer than the model's
    /// positions; [`Error::Setting`] for impossible settings; [`Error::OutOfMemory`] and [`Error::Full`] if
    /// the sequence cannot fit.
    pub fn steps(self) -> Result<Steps<'a>> {
        self.start(true).map(|(steps, _)| steps)
    }

    /// Computes the prompt into the sequence and generates nothing: the sequence is ready to be continued.
    ///
    /// The last token of each row is kept for the next generation, whose first token is chosen by it.
    ///
    /// # Errors
    /// The errors of [`steps`](Self::steps); [`Error::Prompt`] for rows of one token, of which nothing would
    /// be computed; [`Error::Setting`] without a [`sequence`](Self::sequence).
    pub fn prefill(self) -> Result<Reuse> {
        let Self { model, prompt, memory, options, on_oom, .. } = self;
        let Memory::Sequence(sequence) = memory else {
            let why = "a prompt that is computed ahead needs a sequence that holds it; give one".to_owned();
            return Err(Error::Setting { name: "sequence", why });
        };
        let rows = prompt.rows(&model, sequence.cache(), false)?;
        if rows.iter().any(|row| row.len() < 2) {
            let why = "a prompt of one token leaves nothing to cache; give a longer one".to_owned();
            return Err(Error::Prompt { why });
        }
        let all_but_last = rows.iter().map(|row| row[..row.len() - 1].to_vec()).collect();
        // The token that is chosen is not fed, and is dropped.
        let config = GenerationConfig::new().repetition_penalty(1.0).num_beams(1).num_return_sequences(1);
        let config = config.guidance_scale(1.0).penalty_alpha(0.0);
        let options = Options { stopping_criteria: Vec::new(), ..options };
        let request = Request { options, on_oom, ..Request::new(model, Prompt::Batch(all_but_last)) };
        let mut steps =
            request.config(config).max_new_tokens(1).temperature(0.0).sequence(&mut *sequence).steps()?;
        let reuse = steps.reuse();
        steps.try_for_each(|step| step.map(drop))?;
        drop(steps);
        sequence.hold(rows);
        Ok(reuse)
    }
}
