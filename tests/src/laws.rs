//! The laws, for every strategy, on every device. No strategy is named here.

use kiln::{
    GenerationConfig, Model, Plan, RunOptions, STRATEGIES, TokenId,
    device::Opened,
    kernels::Choice,
    memory::{AttentionNeed, LayerNeed, RecurrentNeed},
};
use kiln_testkit::laws::{self, Subject};

use crate::support::{assert_close, batch, forward, llama_with, recorded};

const PROMPT: [TokenId; 11] = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 58];

const NEEDS: [AttentionNeed; 2] = [
    AttentionNeed { kv_heads: 2, head_dim: 2, window: None },
    AttentionNeed { kv_heads: 2, head_dim: 2, window: Some(5) },
];

fn devices() -> impl Iterator<Item = (&'static str, &'static Opened)> {
    kiln_testkit::devices::opened().iter().map(|(name, opened)| (name.as_str(), opened))
}

fn plans() -> impl Iterator<Item = (&'static str, Plan, bool)> {
    STRATEGIES.iter().map(|s| (s.name(), Plan { attention: *s }, s.remembers()))
}

#[test]
fn layers_conform() {
    for (device, opened) in devices() {
        for strategy in STRATEGIES {
            for need in &NEEDS {
                laws::conforms(&Subject {
                    name: format!("{} on {device}, window {:?}", strategy.name(), need.window),
                    device: &opened.device,
                    build: &|| strategy.build(need).unwrap(),
                    remembers: strategy.remembers(),
                    exact: strategy.exact(),
                });
            }
        }
    }
}

#[test]
fn recurrent_layers_conform() {
    let need = LayerNeed::Recurrent(RecurrentNeed { channels: 1, conv_width: 1, state_dim: 1 });
    for (_, opened) in devices() {
        let mut cache = Plan { attention: STRATEGIES[0] }.build(std::slice::from_ref(&need)).unwrap();
        laws::state_conforms(cache.recurrent(0).unwrap(), &opened.device);
    }
}

#[test]
fn cross_layers_conform() {
    let need = LayerNeed::EncoderDecoder(NEEDS[0].clone());
    for (_, opened) in devices() {
        let mut cache = Plan { attention: STRATEGIES[0] }.build(std::slice::from_ref(&need)).unwrap();
        laws::cross_conforms(&mut cache, &opened.device);
    }
}

#[test]
fn chunked_prefill_is_whole_prefill() {
    for (device, opened) in devices() {
        for model in ["llama", "llama_rope_dynamic"] {
            let model = recorded(model, opened);
            for (name, plan, _) in plans() {
                let prompt: Vec<TokenId> = (0..30).map(|i| i * 7 % 97).collect();
                let run = |chunk| {
                    let mut cache = model.cache(&plan).unwrap();
                    let rows = batch(&model, std::slice::from_ref(&prompt));
                    let options = kiln::GenerationOptions {
                        settings: wanted(3).resolve().unwrap(),
                        prefill_chunk: chunk,
                        keep_logits: true,
                        ..kiln::GenerationOptions::default()
                    };
                    // Not through the facade: it refuses prompts beyond the positions, which are the hard case.
                    let prompts = vec![prompt.clone()];
                    let mut generation =
                        kiln::Generation::new(model.causal(), &mut cache, rows, prompts, options).unwrap();
                    let step = generation.next_blocking().unwrap().unwrap();
                    step.logits.unwrap().remove(0)
                };
                let whole = run(None);
                for chunk in [1, 7, 29, 30, 99] {
                    assert_close(
                        &run(Some(chunk)),
                        &whole,
                        &format!("{name} on {device}, chunks of {chunk}"),
                    );
                }
            }
        }
    }
}

#[test]
fn cached_is_recomputed() {
    for (device, opened) in devices() {
        let model = recorded("llama", opened);
        let recompute = |len: usize| {
            let mut cache = model.cache(&Plan::named("none").unwrap()).unwrap();
            let logits = forward(&model, &batch(&model, &[PROMPT[..len].to_vec()]), &mut cache);
            logits[logits.len() - 97..].to_vec()
        };
        for (name, plan, remembers) in plans() {
            if !remembers {
                continue;
            }
            let mut cache = model.cache(&plan).unwrap();
            for (at, &token) in PROMPT.iter().enumerate() {
                let logits = forward(&model, &batch(&model, &[vec![token]]), &mut cache);
                assert_close(&logits, &recompute(at + 1), &format!("{name} on {device} at {at}"));
            }
        }
    }
}

#[test]
fn roll_back_then_replay_is_never_left() {
    for (device, opened) in devices() {
        let model = recorded("llama", opened);
        for (name, plan, remembers) in plans() {
            if !remembers {
                continue;
            }
            let (mut straight, mut detour) = (model.cache(&plan).unwrap(), model.cache(&plan).unwrap());
            detour.keep_history(3);
            forward(&model, &batch(&model, &[PROMPT.to_vec()]), &mut straight);
            forward(&model, &batch(&model, &[PROMPT.to_vec()]), &mut detour);
            forward(&model, &batch(&model, &[vec![7, 7, 7]]), &mut detour);
            detour.roll_back(3).unwrap();
            let next = batch(&model, &[vec![8]]);
            let want = forward(&model, &next, &mut straight);
            assert_eq!(forward(&model, &next, &mut detour), want, "{name} on {device}");
        }
    }
}

#[test]
fn selecting_rows_commutes_with_update() {
    for (device, opened) in devices() {
        let model = recorded("llama", opened);
        let (a, b) = (PROMPT.to_vec(), PROMPT.iter().map(|t| t + 1).collect::<Vec<_>>());
        for (name, plan, remembers) in plans() {
            if !remembers {
                continue;
            }
            let (mut selected, mut direct) = (model.cache(&plan).unwrap(), model.cache(&plan).unwrap());
            forward(&model, &batch(&model, &[a.clone(), b.clone()]), &mut selected);
            selected.select_rows(&[1, 1, 0]).unwrap();
            forward(&model, &batch(&model, &[b.clone(), b.clone(), a.clone()]), &mut direct);
            let next = batch(&model, &[vec![5], vec![6], vec![7]]);
            let want = forward(&model, &next, &mut direct);
            assert_close(&forward(&model, &next, &mut selected), &want, &format!("{name} on {device}"));
        }
    }
}

#[test]
fn the_second_request_is_the_first() {
    for (device, opened) in devices() {
        let model = recorded("llama", opened);
        for (name, plan, _) in plans() {
            let mut reused = model.cache(&plan).unwrap();
            let first = tokens(&model, &mut reused, 12);
            reused.reset();
            assert_eq!(tokens(&model, &mut reused, 12), first, "{name} on {device}");
        }
    }
}

#[test]
fn export_and_import_change_nothing() {
    for (device, opened) in devices() {
        let model = recorded("llama", opened);
        for (name, plan, _) in plans() {
            let (mut stayed, mut moved) = (model.cache(&plan).unwrap(), model.cache(&plan).unwrap());
            forward(&model, &batch(&model, &[PROMPT.to_vec()]), &mut stayed);
            forward(&model, &batch(&model, &[PROMPT.to_vec()]), &mut moved);
            let host = moved.export().unwrap();
            assert_eq!(moved.device_bytes(), 0, "{name} on {device}");
            moved.import(host, model.device()).unwrap();
            let next = batch(&model, &[vec![8]]);
            let want = forward(&model, &next, &mut stayed);
            assert_eq!(forward(&model, &next, &mut moved), want, "{name} on {device}");
        }
    }
}

#[test]
fn every_kind_of_kernel_gives_the_same_tokens() {
    for (device, opened) in devices() {
        let choices: &[Choice] = match device {
            "cpu" => &[Choice::Auto],
            "wgpu" => &[Choice::Wgsl, Choice::Cube],
            _ => &[Choice::Cube],
        };
        let run = |kernels| {
            let model = llama_with(opened, kernels);
            let mut cache = model.cache(&Plan { attention: STRATEGIES[0] }).unwrap();
            tokens(&model, &mut cache, 12)
        };
        let want = run(Choice::Definition);
        for &kernels in choices {
            assert_eq!(run(kernels), want, "{kernels} on {device}");
        }
    }
}

fn wanted(n: usize) -> GenerationConfig {
    GenerationConfig {
        max_new_tokens: Some(n),
        eos_token_id: Some(Vec::new()),
        ..GenerationConfig::default()
    }
}

fn tokens(model: &Model, cache: &mut kiln::ModelCache, n: usize) -> Vec<TokenId> {
    let steps =
        model.generate(cache, vec![PROMPT.to_vec()], &wanted(n), RunOptions::default()).unwrap().steps();
    steps.filter_map(|step| step.unwrap().tokens[0]).collect()
}
