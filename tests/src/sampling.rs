//! Tokens sampled on the device in the public generation loop.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use burn::tensor::{Int, Tensor};
use kiln::{
    GenerationConfig, Model, Plan, Result, Step, TokenId,
    expert::{
        Batch, CausalModel, Generation, GenerationOptions, Logits, ModelCache,
        kernels::Choice,
        memory::{LayerNeed, Pass, RowPosition},
    },
};

use crate::support::llama_with;

fn devices() -> impl Iterator<Item = (&'static str, &'static kiln::device::Opened)> {
    kiln_testkit::devices::opened().iter().map(|(name, opened)| (name.as_str(), opened))
}

fn settings() -> Vec<GenerationConfig> {
    let drawn = GenerationConfig::new()
        .max_new_tokens(24)
        .do_sample(true)
        .temperature(2.0)
        .seed(5)
        // Lets rows end at different steps.
        .eos_token_id((0..97).step_by(12).collect());
    vec![
        drawn.clone(),
        drawn.clone().top_k(0).top_p(0.8),
        drawn.clone().repetition_penalty(1.4).min_p(0.05),
        drawn.repetition_penalty(1.4).do_sample(false),
    ]
}

fn padded() -> Vec<Vec<TokenId>> {
    vec![vec![3, 1, 4, 1, 5, 9, 2], vec![8, 9], vec![5, 5, 5, 5, 5]]
}

fn generation<'a>(
    causal: Arc<dyn CausalModel>,
    model: &Model,
    cache: &'a mut ModelCache,
    wanted: &GenerationConfig,
    options: GenerationOptions,
) -> Generation<'a> {
    let batch = Batch::left_padded(&padded(), 0, model.device()).unwrap();
    let options = GenerationOptions {
        settings: wanted.resolve().unwrap(),
        kernels: Some(model.kernels().clone()),
        ..options
    };
    Generation::new(causal, cache, batch, padded(), options).unwrap()
}

/// If the device has no kernel for a setting, scores are read back, and the tokens equal those of the CPU.
#[test]
fn settings_without_a_kernel_are_named_and_applied() {
    let config = GenerationConfig::new()
        .max_new_tokens(12)
        .repetition_penalty(1.2)
        .no_repeat_ngram_size(2)
        .suppress_tokens(vec![1, 2, 3, 4, 5, 6, 7])
        .eos_token_id((0..97).step_by(12).collect())
        .min_new_tokens(3);
    let mut tokens: Vec<Vec<Vec<Option<TokenId>>>> = Vec::new();
    for (device, opened) in devices() {
        let model = llama_with(opened, Choice::Auto);
        for plan in ["dynamic", "static:len=64", "offloaded"] {
            let mut cache = model.cache(&Plan::named(plan).unwrap()).unwrap();
            let options =
                GenerationOptions { compile: true, lookahead: true, ..GenerationOptions::default() };
            let generation = generation(model.causal().clone(), &model, &mut cache, &config, options);
            let named = generation.processed_on_host();
            let want: &[&str] = if device == "cpu" {
                &[]
            } else {
                &["no_repeat_ngram_size", "min_new_tokens", "suppress_tokens"]
            };
            assert_eq!(named, want, "on {device}");
            tokens.push(generation.map(|step| step.unwrap().tokens).collect());
        }
    }
    assert!(tokens.windows(2).all(|both| both[0] == both[1]), "{tokens:?}");
    assert!(tokens[0].len() > 3 && tokens[0][..3].iter().flatten().all(Option::is_some), "{tokens:?}");
    assert!(tokens[0].iter().flatten().flatten().all(|token| *token == 0 || *token > 7), "{tokens:?}");
}

/// Random words are used as on the host: one per step and row, starting after the prompt. (A draw close to a
/// rounding error may give another token; none of these does.)
#[test]
fn the_device_samples_the_tokens_of_the_host() {
    for (device, opened) in devices() {
        let choices: &[Choice] = match device {
            "cpu" => &[Choice::Auto],
            "cuda" => &[Choice::Auto, Choice::Reference],
            _ => &[Choice::Auto, Choice::Reference, Choice::Cube],
        };
        for &choice in choices {
            let model = llama_with(opened, choice);
            for wanted in settings() {
                for plan in ["static", "none"] {
                    // A cache that is fed again does not depend on the kernels.
                    if plan == "none" && choice != Choice::Auto {
                        continue;
                    }
                    let run = |keep_scores, lookahead, compile| {
                        let mut cache = model.cache(&Plan::named(plan).unwrap()).unwrap();
                        let options =
                            GenerationOptions { keep_scores, lookahead, compile, ..Default::default() };
                        let steps = generation(model.causal().clone(), &model, &mut cache, &wanted, options);
                        steps.map(|step| step.unwrap().tokens).collect::<Vec<_>>()
                    };
                    let what = format!("{choice} on {device}, {plan}, {wanted:?}");
                    let sampled = || {
                        let ran = model.kernels().ran();
                        ran.iter().filter(|ran| ran.kernel == "sample").map(|ran| ran.count).sum::<u64>()
                    };
                    let want = run(true, false, false);
                    let before = sampled();
                    assert_eq!(run(false, false, false), want, "{what}");
                    let on_device = device != "cpu" && choice != Choice::Reference;
                    assert_eq!(sampled() > before, on_device, "{what}");
                    assert_eq!(run(false, true, false), want, "{what}: ahead");
                    if opened.is_asynchronous() && plan == "static" {
                        assert_eq!(run(false, true, true), want, "{what}: captured");
                        assert_eq!(run(false, false, true), want, "{what}: captured, not ahead");
                    }
                }
            }
        }
    }
}

/// A model whose logits of one row are NaN after a number of forward passes.
#[derive(Debug)]
struct Broken {
    model: Arc<dyn CausalModel>,
    passes: AtomicUsize,
    row: usize,
}

/// Number of correct passes.
const RIGHT: usize = 3;

impl CausalModel for Broken {
    fn needs(&self) -> Vec<LayerNeed> {
        self.model.needs()
    }

    fn vocab(&self) -> usize {
        self.model.vocab()
    }

    fn rotary_tables(
        &self,
        rows: &[RowPosition],
        steps: usize,
        device: &burn::tensor::Device,
    ) -> Vec<(Tensor<3>, Tensor<3>)> {
        self.model.rotary_tables(rows, steps, device)
    }

    fn head(&self, hidden: Tensor<3>) -> Tensor<3> {
        self.model.head(hidden)
    }

    fn compute(&self, batch: &Batch, logits: Logits<'_>, pass: &mut Pass<'_>) -> Result<Tensor<3>> {
        let logits = self.model.compute(batch, logits, pass)?;
        if self.passes.fetch_add(1, Ordering::Relaxed) < RIGHT {
            return Ok(logits);
        }
        let row = Tensor::<1, Int>::from_data([self.row as i32], &logits.device());
        let [_, _, vocab] = logits.dims();
        let broken = logits.clone().select(0, row.clone()) * f32::NAN;
        Ok(logits.slice_assign([self.row..self.row + 1, 0..1, 0..vocab], broken))
    }
}

#[test]
fn logits_that_are_not_finite_are_errors_at_their_own_step() {
    for (device, opened) in devices() {
        let model = llama_with(opened, Choice::Auto);
        for lookahead in [false, true] {
            for row in 0..3 {
                let broken =
                    Arc::new(Broken { model: model.causal().clone(), passes: AtomicUsize::new(0), row });
                let mut cache = model.cache(&Plan::dynamic()).unwrap();
                let wanted = settings().swap_remove(0).eos_token_id(Vec::new());
                let options = GenerationOptions { lookahead, ..Default::default() };
                let steps: Vec<Result<Step>> =
                    generation(broken, &model, &mut cache, &wanted, options).collect();
                assert_eq!(steps.len(), RIGHT + 1, "on {device}");
                let error = steps.last().unwrap().as_ref().unwrap_err().to_string();
                assert!(error.contains("not finite"), "on {device}: {error}");
                assert!(steps[..RIGHT].iter().all(Result::is_ok), "on {device}");
            }
        }
    }
}
