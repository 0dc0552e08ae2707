//! Counts and times for Prometheus, under Kiln's names and those of vLLM, which routers and dashboards know.

use std::{sync::atomic::AtomicU64, time::Duration};

use kiln::{Stats, StopReason};
use prometheus_client::{
    encoding::{EncodeLabelSet, text::encode},
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::{Metric, Registry},
};

/// Seconds of the steps of histograms.
const SECONDS: [f64; 14] =
    [0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0];

/// The name that requests use for a model.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Of {
    model_name: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Reason {
    model_name: String,
    finished_reason: &'static str,
}

/// The cache of a model, in numbers that routers know from vLLM.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CacheConfig {
    model_name: String,
    /// Tokens at whose multiples prompts are reused.
    block_size: usize,
    /// Blocks of as many tokens as all rows can have.
    num_gpu_blocks: usize,
}

type Histograms = Family<Of, Histogram, fn() -> Histogram>;

/// The metrics of a server. Copies share their numbers.
#[derive(Clone, Debug)]
pub(crate) struct Metrics {
    registry: std::sync::Arc<Registry>,
    running: Family<Of, Gauge>,
    waiting: Family<Of, Gauge>,
    cache_usage: Family<Of, Gauge<f64, AtomicU64>>,
    cache_config: Family<CacheConfig, Gauge>,
    prompt_tokens: Family<Of, Counter>,
    generated: Family<Of, Counter>,
    prefix_queries: Family<Of, Counter>,
    prefix_hits: Family<Of, Counter>,
    ended: Family<Reason, Counter>,
    first_token: Histograms,
    next_token: Histograms,
    whole: Histograms,
}

/// The metrics of one model.
#[derive(Clone, Debug)]
pub(crate) struct ModelMetrics {
    name: String,
    running: Gauge,
    waiting: Gauge,
    cache_usage: Gauge<f64, AtomicU64>,
    prompt_tokens: Counter,
    generated: Counter,
    prefix_queries: Counter,
    prefix_hits: Counter,
    ended: Family<Reason, Counter>,
    first_token: Histogram,
    next_token: Histogram,
    whole: Histogram,
}

impl Metrics {
    pub(crate) fn new() -> Self {
        let histogram = || Histograms::new_with_constructor(|| Histogram::new(SECONDS));
        let mut registry = Registry::default();
        let metrics = Self {
            registry: std::sync::Arc::default(),
            running: Family::default(),
            waiting: Family::default(),
            cache_usage: Family::default(),
            cache_config: Family::default(),
            prompt_tokens: Family::default(),
            generated: Family::default(),
            prefix_queries: Family::default(),
            prefix_hits: Family::default(),
            ended: Family::default(),
            first_token: histogram(),
            next_token: histogram(),
            whole: histogram(),
        };
        let of = &metrics;
        let mut both = Both(&mut registry);
        both.add("num_requests_running", "Answers that are computed", &of.running);
        both.add("num_requests_waiting", "Answers that wait for others to end", &of.waiting);
        both.add("kv_cache_usage_perc", "Share of the rows that are used, from 0 to 1", &of.cache_usage);
        both.add("cache_config_info", "Sizes of the cache, as labels", &of.cache_config);
        both.add("prompt_tokens", "Tokens of prompts", &of.prompt_tokens);
        both.add("generation_tokens", "Tokens of answers", &of.generated);
        both.add("prefix_cache_queries", "Tokens of prompts that were looked up", &of.prefix_queries);
        both.add("prefix_cache_hits", "Tokens of prompts that were not computed again", &of.prefix_hits);
        both.add("request_success", "Answers that ended", &of.ended);
        both.add("time_to_first_token_seconds", "Time to the first piece of text", &of.first_token);
        both.add("inter_token_latency_seconds", "Time between two pieces of text", &of.next_token);
        both.add("e2e_request_latency_seconds", "Time of an answer", &of.whole);
        Self { registry: registry.into(), ..metrics }
    }

    /// The metrics of the model with this name.
    pub(crate) fn of(&self, name: &str) -> ModelMetrics {
        let of = Of { model_name: name.to_owned() };
        ModelMetrics {
            name: name.to_owned(),
            running: self.running.get_or_create(&of).clone(),
            waiting: self.waiting.get_or_create(&of).clone(),
            cache_usage: self.cache_usage.get_or_create(&of).clone(),
            prompt_tokens: self.prompt_tokens.get_or_create(&of).clone(),
            generated: self.generated.get_or_create(&of).clone(),
            prefix_queries: self.prefix_queries.get_or_create(&of).clone(),
            prefix_hits: self.prefix_hits.get_or_create(&of).clone(),
            ended: self.ended.clone(),
            first_token: self.first_token.get_or_create(&of).clone(),
            next_token: self.next_token.get_or_create(&of).clone(),
            whole: self.whole.get_or_create(&of).clone(),
        }
    }

    /// Tells the sizes of the cache of a model: of its `rows`, each of up to `positions` tokens, in blocks.
    pub(crate) fn cache_config(&self, name: &str, block_size: usize, rows: usize, positions: usize) {
        let num_gpu_blocks = rows * positions.div_ceil(block_size.max(1));
        let config = CacheConfig { model_name: name.to_owned(), block_size, num_gpu_blocks };
        self.cache_config.get_or_create(&config).set(1);
    }

    /// The text that Prometheus reads.
    pub(crate) fn text(&self) -> Result<String, std::fmt::Error> {
        let mut text = String::new();
        encode(&mut text, &self.registry).map(|()| text)
    }
}

impl ModelMetrics {
    /// Sets the numbers of answers that are computed and that wait, of at most `rows`.
    pub(crate) fn observe(&self, running: usize, waiting: usize, rows: usize) {
        self.running.set(running as i64);
        self.waiting.set(waiting as i64);
        self.cache_usage.set((running as f64 / rows as f64).min(1.0));
    }

    pub(crate) fn first_token(&self, after: Duration) {
        self.first_token.observe(after.as_secs_f64());
    }

    pub(crate) fn next_token(&self, after: Duration) {
        self.next_token.observe(after.as_secs_f64());
    }

    pub(crate) fn ended(&self, reason: StopReason, stats: &Stats, after: Duration) {
        let prompt = (stats.prompt_tokens + stats.reused) as u64;
        self.prompt_tokens.inc_by(prompt);
        self.prefix_queries.inc_by(prompt);
        self.prefix_hits.inc_by(stats.reused as u64);
        self.generated.inc_by(stats.generated as u64);
        let finished_reason = crate::api::finish_reason(reason);
        self.ended.get_or_create(&Reason { model_name: self.name.clone(), finished_reason }).inc();
        self.whole.observe(after.as_secs_f64());
    }
}

/// Registers each metric under both names.
struct Both<'a>(&'a mut Registry);

impl Both<'_> {
    fn add(&mut self, name: &str, help: &str, metric: &(impl Metric + Clone)) {
        self.0.register(format!("kiln_{name}"), help, metric.clone());
        self.0.register(format!("vllm:{name}"), help, metric.clone());
    }
}
