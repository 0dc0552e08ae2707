//! Beams whose candidates the device finds are those that the host finds among all scores.

use kiln::{Completion, GenerationConfig, Model, kernels::Choice};

use crate::support::{greedy, llama_with};

/// Scores are sums of log-probabilities, which the device adds up in another order.
const CLOSE: f32 = 1e-4;

fn completions(model: &Model, config: &GenerationConfig, keep_scores: bool) -> Vec<Vec<Completion>> {
    let prompts = vec![vec![3, 1, 4, 1, 5, 9, 2, 6], vec![27, 18, 28]];
    let request = model.generate(prompts).config(config.clone()).keep_scores(keep_scores);
    let mut steps = request.steps().unwrap();
    steps.try_for_each(|step| step.map(drop)).unwrap();
    steps.completions().unwrap()
}

#[test]
fn candidates_of_the_device_are_those_of_the_host() {
    let configs = [
        greedy(9).num_beams(4).num_return_sequences(4),
        greedy(9).num_beams(3).length_penalty(-1.0).eos_token_id(vec![7, 20, 41]),
        greedy(9).num_beams(40).num_return_sequences(40),
        greedy(9).num_beams(8).num_beam_groups(8).diversity_penalty(1.5).num_return_sequences(8),
        greedy(9).num_beams(6).num_beam_groups(3).diversity_penalty(0.3).num_return_sequences(6),
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
                let host = completions(&model, config, true);
                let searched = || model.kernels().ran().iter().any(|ran| ran.kernel == "top_logprobs");
                assert!(!searched() || config != &configs[0], "{what}: the scores were kept");
                let found = completions(&model, config, false);
                assert!(searched(), "{what}: the device did not find the candidates");
                assert_eq!(found.len(), host.len(), "{what}");
                for (found, host) in found.iter().flatten().zip(host.iter().flatten()) {
                    assert_eq!(found.tokens, host.tokens, "{what}");
                    assert_eq!(found.beam_indices, host.beam_indices, "{what}");
                    assert_eq!(found.stop_reason, host.stop_reason, "{what}");
                    let (score, want) = (found.score.unwrap(), host.score.unwrap());
                    assert!((score - want).abs() < CLOSE, "{what}: {score}, not {want}");
                }
            }
        }
    }
}
