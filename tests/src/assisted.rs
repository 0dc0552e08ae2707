//! Assisted decoding gives the same tokens as the model alone, on every device and with every cache that can
//! roll back a proposal.

use kiln::{
    Error, GenerationConfig, Grammar, Model, OnOutOfMemory, Plan, Sequence, Stats, Step, TokenId,
    device::Opened,
};
use serde_json::{Value, json};

use crate::{
    chat::folder,
    requests::demos,
    support::{float32, greedy, recorded},
};

fn devices() -> impl Iterator<Item = (&'static str, &'static Opened)> {
    kiln_testkit::devices::opened().iter().map(|(name, opened)| (name.as_str(), opened))
}

/// Rows of different lengths that repeat themselves.
fn prompts() -> Vec<Vec<TokenId>> {
    let phrase = [14, 14, 15, 31, 22, 28, 14, 50, 26, 79];
    vec![phrase.repeat(2), phrase.to_vec(), vec![8, 9], vec![5, 5, 5, 5, 5]]
}

fn run(
    model: &Model,
    draft: Option<&Model>,
    plan: &Plan,
    prompts: &[Vec<TokenId>],
    config: GenerationConfig,
) -> (Vec<Vec<TokenId>>, Stats) {
    let request = model.generate(prompts.to_vec()).plan(plan.clone()).config(config);
    let mut steps = draft.into_iter().fold(request, |request, draft| request.draft(draft)).steps().unwrap();
    let mut rows = vec![Vec::new(); prompts.len()];
    for step in steps.by_ref() {
        for (row, token) in rows.iter_mut().zip(step.unwrap().tokens) {
            row.extend(token);
        }
    }
    (rows, steps.stats())
}

#[test]
fn assisted_decoding_gives_the_tokens_of_the_model_alone() {
    const TOKENS: usize = 16;

    for (device, opened) in devices() {
        for (name, caches) in [
            (
                "llama",
                &[
                    "dynamic",
                    "dynamic + offload=all",
                    "static",
                    "static:len=60",
                    "static:len=60 + offload=all",
                    "quantized:group=8,residual=64",
                    "quantized:group=8,residual=64,format=quanto,flush=requantize",
                    "sink:window=64,sinks=2",
                ][..],
            ),
            ("mistral", &["dynamic", "sliding", "static"]),
            ("gemma2", &["dynamic", "static"]),
            ("mamba", &["dynamic", "dynamic + offload=all"]),
        ] {
            let model = recorded(name, opened);
            let draft = recorded("llama_draft", opened);
            for cache in caches {
                // Roll-back is the same on every device; only dense and packed caches have their own kernels.
                let has_kernels = ["dynamic", "static:len=60", "sliding", "quantized:group=8,residual=64"];
                if device != "cpu" && !has_kernels.contains(cache) {
                    continue;
                }
                let plan = Plan::named(cache).unwrap();
                let alone = if *cache == "dynamic" { Some(1) } else { None };
                for rows in alone.into_iter().chain([4]) {
                    let prompts = &prompts()[..rows];
                    let what = format!("{name}, {cache} on {device}, {rows} rows");
                    let (plain, _) = run(&model, None, &plan, prompts, greedy(TOKENS));
                    let lookup = greedy(TOKENS).prompt_lookup_num_tokens(4);
                    let (looked_up, stats) = run(&model, None, &plan, prompts, lookup);
                    assert_eq!(looked_up, plain, "{what}, prompt lookup");
                    assert!(stats.accepted > 0, "{what}: {stats:?}");
                    if draft.sizes().vocab == model.sizes().vocab {
                        let config = greedy(TOKENS).num_assistant_tokens(4);
                        let (drafted, _) = run(&model, Some(&draft), &plan, prompts, config.clone());
                        assert_eq!(drafted, plain, "{what}, another draft model");
                        let (drafted, stats) = run(&model, Some(&model), &plan, prompts, config);
                        assert_eq!(drafted, plain, "{what}, the same model");
                        // The draft model keeps its own keys and values unquantized.
                        let agrees = stats.accepted == stats.proposed;
                        assert!(agrees || cache.contains("quantized"), "{what}: {stats:?}");
                    }
                }
            }
        }
    }
}

/// A grammar for JSON in which most tokens are forced, with a few choices.
fn report() -> Grammar {
    let schema = r#"{
        "type": "object",
        "properties": {
            "the_name_of_the_person": {"enum": ["Romeo", "Juliet"]},
            "the_years_of_the_person": {"type": "integer", "minimum": 1, "maximum": 99},
            "the_friends": {"type": "array", "items": {"enum": ["Benvolio", "Mercutio"]}, "minItems": 5, "maxItems": 5}
        },
        "required": ["the_name_of_the_person", "the_years_of_the_person", "the_friends"],
        "additionalProperties": false,
        "x-guidance": {"whitespace_flexible": false}
    }"#;
    Grammar::json_schema(schema).unwrap()
}

#[test]
fn a_grammar_with_drafts_gives_the_tokens_of_the_grammar_alone() {
    let mut accepted = 0;
    for (device, model) in demos() {
        let prompts = ["A person of the play: ", "to be, to be, to be, to be, to be,", "ROMEO:"];
        let prompts = prompts.map(|prompt| model.encode(prompt).unwrap());
        // The other cases do not depend on the device.
        let caches = [("dynamic", 3), ("dynamic", 1), ("static", 2), ("none", 1)];
        let caches = if device == "cpu" { &caches[..] } else { &caches[..1] };
        for &(cache, rows) in caches {
            for config in [
                GenerationConfig::new().do_sample(false),
                GenerationConfig::new().temperature(2.0).do_sample(true),
            ] {
                let what = format!("{cache} on {device}, {rows} rows, {:?}", config.temperature);
                let words = Grammar::regex("[A-Za-z ,:.']{1,60}").unwrap();
                let of = |grammar: Grammar, config: GenerationConfig| {
                    let plan = Plan::named(cache).unwrap();
                    let request = model.generate(prompts[..rows].to_vec()).plan(plan).config(config);
                    let most = if device == "cpu" { 80 } else { 40 };
                    request.grammar(grammar).seed(5).max_new_tokens(most).keep_scores(true)
                };
                let request = |config| of(report(), config);
                let all = |steps: kiln::Result<kiln::Steps<'_>>| {
                    let mut steps = steps.unwrap();
                    let all: Vec<Step> = steps.by_ref().map(Result::unwrap).collect();
                    (all, steps.stats())
                };
                let (plain, stats) = all(request(config.clone()).fast_forward(false).steps());
                assert_eq!((stats.proposed, stats.forced), (0, 0));
                let tokens =
                    |steps: &[Step]| -> Vec<_> { steps.iter().map(|step| step.tokens.clone()).collect() };

                let (forced, stats) = all(request(config.clone()).steps());
                assert!(forced == plain, "{what}: forced tokens are fed at once, bit for bit");
                assert_eq!(stats.forced > 20, cache != "none", "{what}: {stats:?}");
                if cache == "none" || device != "cpu" {
                    continue;
                }
                let lookup = config.clone().prompt_lookup_num_tokens(4);
                let (looked_up, _) = all(request(lookup.clone()).steps());
                assert_eq!(tokens(&looked_up), tokens(&plain), "{what}, prompt lookup");
                let (free, _) = all(of(words.clone(), config.clone()).steps());
                let (looked_up, stats) = all(of(words, lookup).steps());
                assert_eq!(tokens(&looked_up), tokens(&free), "{what}, prompt lookup");
                accepted += stats.accepted;
                let drafting = config.clone().num_assistant_tokens(4).assistant_confidence_threshold(0.0);
                let (drafted, stats) = all(request(drafting).draft(&model).steps());
                assert!(stats.accepted > 0, "{what}: {stats:?}");
                match config.do_sample {
                    Some(true) => {
                        let ends = drafted.last().is_some_and(|step| step.finished.iter().all(|&over| over));
                        assert!(ends, "{what}, a draft model");
                    }
                    _ => assert_eq!(tokens(&drafted), tokens(&plain), "{what}, a draft model"),
                }
            }
        }
        assert!(accepted > 0 || device != "cpu", "prompt lookup");
    }
}

/// Loads the demo model with the demo tokenizer changed by `change`.
fn with_tokenizer(opened: &Opened, change: impl Fn(&mut Value)) -> Model {
    let file = include_str!("../../assets/demo/tokenizer.json");
    let mut tokenizer: Value = serde_json::from_str(file).unwrap();
    change(&mut tokenizer);
    let folder = folder(&[("tokenizer.json", &tokenizer.to_string())]);
    float32(Model::builder(folder.path()), opened).load().unwrap()
}

/// Gives each text token the text of the token in `place`.
fn renamed(tokenizer: &mut Value, place: impl Fn(usize) -> Option<String>) {
    let vocab = tokenizer["model"]["vocab"].as_object_mut().unwrap();
    let of = |id: &Value| place(id.as_u64().unwrap() as usize);
    *vocab = vocab.iter().map(|(text, id)| (of(id).unwrap_or(text.clone()), id.clone())).collect();
}

#[test]
fn a_draft_model_with_another_tokenizer_changes_no_token() {
    for ((device, demo), (_, opened)) in demos().zip(devices()) {
        // With one more token, which is never chosen: the same model, but its proposals are translated
        // through text.
        let same = with_tokenizer(opened, |file| {
            let extra = json!({"id": 2048, "content": "<extra>", "single_word": false, "lstrip": false,
                "rstrip": false, "normalized": false, "special": true});
            file["added_tokens"].as_array_mut().unwrap().push(extra);
        });
        // Each token has the text of the one at the opposite end of the vocabulary, so the model writes
        // gibberish.
        let mirrored = with_tokenizer(opened, |file| {
            let vocab = file["model"]["vocab"].as_object_mut().unwrap();
            vocab.values_mut().for_each(|id| *id = json!((2050 - id.as_u64().unwrap()).min(2047)));
            for (text, id) in [("<s>", 0), ("</s>", 1), ("<pad>", 2)] {
                vocab.insert(text.to_owned(), json!(id));
            }
        });
        let texts = ["The Constitution", "ROMEO:\nBut soft, what light", "To be, or not to be:"];
        for (what, model, draft) in [("text", &demo, &same), ("gibberish", &mirrored, &demo)] {
            let prompts: Vec<_> = texts.iter().map(|text| model.encode(text).unwrap()).collect();
            // The way in which tokens are proposed does not depend on the device.
            let (tokens, cases) = match device {
                "cpu" => (16, &[(3, 10), (1, 10), (3, 1)][..]),
                _ if what == "text" => (6, &[(3, 10)][..]),
                _ => continue,
            };
            for &(rows, lookbehind) in cases {
                let config = greedy(tokens).num_assistant_tokens(5).assistant_confidence_threshold(0.0);
                let config = config.assistant_lookbehind(lookbehind).target_lookbehind(lookbehind);
                let plan = Plan::dynamic();
                let what = format!("{what} on {device}, {rows} rows, {lookbehind} tokens back");
                let (plain, _) = run(model, None, &plan, &prompts[..rows], config.clone());
                let (drafted, stats) = run(model, Some(draft), &plan, &prompts[..rows], config.clone());
                assert_eq!(drafted, plain, "{what}");
                assert!(stats.proposed > 0, "{what}");
                if what.starts_with("text") && lookbehind == 10 {
                    assert!(stats.accepted * 10 > stats.proposed * 8, "{what}: {stats:?}");
                }
                if device != "cpu" {
                    continue;
                }
                let sampled = config.do_sample(true).temperature(0.9).seed(3);
                let (plain, _) = run(model, None, &plan, &prompts[..rows], sampled.clone());
                let (drafted, _) = run(model, Some(draft), &plan, &prompts[..rows], sampled);
                assert_eq!(drafted, plain, "{what}, sampled");
            }
        }
    }
}

#[test]
fn a_draft_model_without_a_common_token_is_an_error() {
    let (_, demo) = demos().next().unwrap();
    let (_, opened) = devices().next().unwrap();
    let foreign = with_tokenizer(opened, |file| {
        file["model"]["merges"] = json!([]);
        renamed(file, |id| (id > 2).then(|| char::from_u32(0x4e00 + id as u32).unwrap().to_string()));
    });
    let request = |config: GenerationConfig| demo.generate("To be").config(config).draft(&foreign).text();
    let said = request(greedy(3)).unwrap_err().to_string();
    assert!(said.contains("has no token in common with that of the model"), "{said}");
    for name in ["assistant_lookbehind", "target_lookbehind"] {
        let none = GenerationConfig::from_arguments(json!({name: 0}).as_object().unwrap()).unwrap();
        let said = request(none).unwrap_err().to_string();
        assert!(said.contains(&format!("{name}: is 0, must be at least 1")), "{said}");
    }
}

#[test]
fn caches_that_quantize_or_evict_per_pass_work_with_prompt_lookup() {
    for (device, opened) in devices() {
        let model = recorded("llama", opened);
        for cache in [
            "quantized:group=8,residual=8",
            "quantized:group=8,residual=8,format=quanto,flush=requantize",
            "sink:window=12,sinks=2",
        ] {
            let plan = Plan::named(cache).unwrap();
            let mut sequence = Sequence::new(&model, &plan).unwrap();
            let prompts = &prompts()[..2];
            let config = greedy(40).prompt_lookup_num_tokens(5);
            let steps =
                model.generate(prompts.to_vec()).config(config).sequence(&mut sequence).steps().unwrap();
            let steps: Vec<_> = steps.map(Result::unwrap).collect();
            assert_eq!(steps.len(), 40, "{cache} on {device}");
            for (row, (held, prompt)) in sequence.ids().into_iter().zip(prompts).enumerate() {
                let tokens = steps.iter().filter_map(|step| step.tokens[row]);
                let whole: Vec<TokenId> = prompt.iter().copied().chain(tokens).collect();
                assert!(whole.starts_with(held), "{cache} on {device}");
            }
        }
    }
}

#[test]
fn a_sequence_can_be_continued_with_prompt_lookup() {
    for (device, opened) in devices() {
        let model = recorded("llama", opened);
        let mut sequence = Sequence::new(&model, &Plan::dynamic()).unwrap();
        let mut row = prompts().remove(0);
        for round in 0..3 {
            let config = greedy(7).prompt_lookup_num_tokens(5);
            let steps = model.generate(row.clone()).config(config).sequence(&mut sequence).steps().unwrap();
            let tokens: Vec<TokenId> = steps.filter_map(|step| step.unwrap().tokens[0]).collect();
            let (plain, _) = run(&model, None, &Plan::dynamic(), &[row.clone()], greedy(7));
            assert_eq!(tokens, plain[0], "{device}, round {round}");
            row.extend(tokens);
            assert_eq!(sequence.ids(), [&row[..row.len() - 1]], "all tokens but the last");
            row.extend([3, 1, 4]);
        }
    }
}

#[test]
fn a_failed_allocation_changes_no_token() {
    for (device, opened) in devices() {
        let model = recorded("llama", opened);
        let (plain, _) = run(&model, None, &Plan::dynamic(), &prompts()[..2], greedy(24));
        for at in [1, 3, 8] {
            let config = greedy(24).prompt_lookup_num_tokens(4);
            let prompts = prompts()[..2].to_vec();
            let request = model.generate(prompts).config(config).on_oom(OnOutOfMemory::Offload);
            let mut steps = request.steps().unwrap();
            let mut rows = vec![Vec::new(); 2];
            let mut step = 0;
            for tokens in steps.by_ref() {
                for (row, token) in rows.iter_mut().zip(tokens.unwrap().tokens) {
                    row.extend(token);
                }
                step += 1;
                if step == at {
                    model.budget().fail_allocation(1);
                }
            }
            assert_eq!(rows, plain, "{device}, after {at} steps");
        }
    }
}

#[test]
fn prompt_lookup_with_incompatible_settings_is_an_error() {
    for (_, opened) in devices().take(1) {
        let model = recorded("llama", opened);
        let refused = |config: GenerationConfig, cache: &str| {
            let plan = Plan::named(cache).unwrap();
            match model.generate(vec![3, 1, 4]).plan(plan).config(config).steps() {
                Err(error @ Error::Setting { .. }) => error.to_string(),
                other => panic!("{other:?}"),
            }
        };
        for cache in ["none", "sink:window=12,sinks=2,compat=4.47"] {
            let said = refused(greedy(3).prompt_lookup_num_tokens(4), cache);
            assert!(said.contains("must be forgotten, which the"), "{cache}: {said}");
        }
        let said = refused(greedy(3).prompt_lookup_num_tokens(4).num_beams(2), "dynamic");
        assert!(said.contains("set num_beams to 1"), "{said}");
        let said = refused(greedy(3).prompt_lookup_num_tokens(4).guidance_scale(2.0), "dynamic");
        assert!(said.contains("does not go with `guidance_scale` yet"), "{said}");
    }
}
