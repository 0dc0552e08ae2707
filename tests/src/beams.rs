//! Beam search on the device finds the same beams as the host does with all scores.

use kiln::{
    Completion, GenerationConfig, Model, Plan,
    expert::{cache_samples, kernels::Choice},
};

use crate::support::{greedy, llama_with, recorded, some_on};

/// Tolerance of scores: they are sums of log-probabilities, which the device adds in another order.
const CLOSE: f32 = 1e-4;

/// Where the search runs.
#[derive(Clone, Copy, Debug, PartialEq)]
enum By {
    /// On the host, because the request asks for the scores.
    Host,
    Device {
        captured: bool,
    },
}

const LAUNCHED: By = By::Device { captured: false };
const CAPTURED: By = By::Device { captured: true };

fn completions(model: &Model, plan: &Plan, config: &GenerationConfig, by: By) -> Vec<Vec<Completion>> {
    let prompts = vec![vec![3, 1, 4, 1, 5, 9, 2, 6], vec![27, 18, 28]];
    let request = model.generate(prompts).plan(plan.clone()).config(config.clone());
    let request = request.keep_scores(by == By::Host).compile(Some(by == CAPTURED));
    let mut steps = request.steps().unwrap();
    steps.try_for_each(|step| step.map(drop)).unwrap();
    steps.completions().unwrap()
}

/// Returns the number of launches of a kernel so far.
fn launched(model: &Model, kernel: &str) -> u64 {
    model.kernels().ran().iter().filter(|ran| ran.kernel == kernel).map(|ran| ran.count).sum()
}

/// Compares the beams of the device with those of the host.
fn same(found: &[Vec<Completion>], host: &[Vec<Completion>], what: &str) {
    assert_eq!(found.len(), host.len(), "{what}");
    for (found, host) in found.iter().flatten().zip(host.iter().flatten()) {
        assert_eq!(found.tokens, host.tokens, "{what}");
        assert_eq!(found.beam_indices, host.beam_indices, "{what}");
        assert_eq!(found.stop_reason, host.stop_reason, "{what}");
        let (score, want) = (found.score.unwrap(), host.score.unwrap());
        assert!((score - want).abs() < CLOSE, "{what}: {score}, not {want}");
    }
}

#[test]
fn beam_search_on_the_device_finds_the_beams_of_the_host() {
    let configs = [
        greedy(9).num_beams(4).num_return_sequences(4),
        greedy(9).num_beams(3).length_penalty(-1.0).eos_token_id(vec![7, 20, 41]),
        greedy(9).num_beams(40).num_return_sequences(40),
        greedy(9).num_beams(8).num_beam_groups(8).diversity_penalty(1.5).num_return_sequences(8),
        greedy(9).num_beams(6).num_beam_groups(3).diversity_penalty(0.3).num_return_sequences(6),
        // The groups end at different steps.
        greedy(12)
            .num_beams(6)
            .num_beam_groups(3)
            .diversity_penalty(2.0)
            .num_return_sequences(6)
            .eos_token_id((0..40).collect::<Vec<_>>())
            .length_penalty(-2.0),
    ];
    for (device, opened) in kiln_testkit::devices::opened() {
        // On the CPU, the host has the scores anyway.
        if device == "cpu" {
            continue;
        }
        for kernels in [Choice::Auto, Choice::Cube] {
            let model = llama_with(opened, kernels);
            for config in &configs {
                let what = format!("{kernels} on {device}, {config:?}");
                let before = launched(&model, "beam_step");
                let host = completions(&model, &Plan::dynamic(), config, By::Host);
                assert_eq!(launched(&model, "beam_step"), before, "{what}: the scores were kept");
                let found = completions(&model, &Plan::dynamic(), config, LAUNCHED);
                let steps = launched(&model, "beam_step") - before;
                assert!(steps > 1, "{what}: the device did not search");
                assert!(launched(&model, "kv_reorder") > 0, "{what}: no rows were moved");
                same(&found, &host, &what);
            }
        }
    }
}

/// Windows of 8 slide, and `dynamic` grows during the search. A captured step gives the same result, bit for
/// bit.
#[test]
fn device_and_host_find_the_same_beams_with_every_cache() {
    for (device, opened) in kiln_testkit::devices::opened() {
        if device == "cpu" {
            continue;
        }
        let mut tested = Vec::new();
        for (name, eos) in [("llama", vec![7, 20]), ("mistral", Vec::new())] {
            let model = recorded(name, opened);
            let needs = model.causal().needs();
            for cache in some_on(device, cache_samples()) {
                let plan = Plan::named(&cache).unwrap();
                if plan.check(&needs).is_err() || tested.contains(&cache) {
                    continue;
                }
                tested.push(cache.clone());
                let what = format!("{name}, {cache} on {device}");
                // A buffer of `dynamic` initially has 64 slots.
                let grows = ["static", "dynamic", "sliding"].contains(&cache.as_str());
                let config = greedy(if grows { 60 } else { 24 }).num_beams(3).num_return_sequences(3);
                let config = config.eos_token_id(eos.clone());
                let host = completions(&model, &plan, &config, By::Host);
                let before = launched(&model, "beam_step");
                let found = completions(&model, &plan, &config, LAUNCHED);
                let steps = launched(&model, "beam_step") - before;
                // Caches that are fed again or packed across rows are reordered by the host.
                let on_host = !plan.remembers(&needs) || cache.contains("requantize");
                assert_eq!(steps == 0, on_host, "{what}: {steps} steps on the device");
                same(&found, &host, &what);
                let captured = completions(&model, &plan, &config, CAPTURED);
                assert_eq!(captured, found, "{what}, captured");
                let again = launched(&model, "beam_step") - before - steps;
                if grows {
                    assert!(again * 2 < steps, "{what}: {again} launches are not few beside {steps}");
                }
            }
        }
    }
}

/// Recurrent states move with their rows: transformers 4.47 did not move them.
#[test]
fn beams_of_a_recurrent_model_are_the_same_without_a_cache() {
    for (device, opened) in kiln_testkit::devices::opened() {
        let model = recorded("mamba", opened);
        let found = |plan: Plan| {
            let prompts = vec![vec![3, 1, 4, 1, 5, 9, 2, 6], vec![27, 18, 28]];
            let config = greedy(12).num_beams(4).num_return_sequences(4);
            let mut steps = model.generate(prompts).plan(plan).config(config).steps().unwrap();
            steps.try_for_each(|step| step.map(drop)).unwrap();
            let completions = steps.completions().unwrap();
            completions.into_iter().flatten().map(|completion| completion.tokens).collect::<Vec<_>>()
        };
        let want = found(Plan::none());
        assert_eq!(found(Plan::dynamic()), want, "{device}");
        assert_eq!(found(Plan::named("offloaded").unwrap()), want, "offloaded on {device}");
    }
}
