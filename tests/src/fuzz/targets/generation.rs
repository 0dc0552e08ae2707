//! `generation_config.json` and call arguments: read, merged, resolved, and used in a generation.

use std::{fs, path::Path};

use kiln::{GenerationConfig, Plan, expert::cache_text};
use serde_json::{Value, json};

use super::{PROMPT, copied, cpu, limited, tokenizer::of_recorded};
use crate::{
    fuzz::{Run, Target, mutate::Format, put},
    support::{architectures, fixtures_of},
};

pub(in crate::fuzz) const TARGET: Target =
    Target { name: "generation_config", format: Format::Json, seeds, prepare };

fn seeds() -> Vec<Vec<u8>> {
    let recorded = architectures()
        .map(|name| fs::read(fixtures_of(name).join("models").join(name).join("generation_config.json")));
    let written = [
        json!({"max_new_tokens": 3, "do_sample": true, "temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.05,
               "repetition_penalty": 1.1, "seed": 7, "eos_token_id": [2, 5], "pad_token_id": 0, "bos_token_id": 1}),
        json!({"max_length": 40, "do_sample": true, "temperature": 1.5, "top_k": 0, "seed": 1, "stop_strings": ["ab", "b"]}),
        json!({"max_length": 20, "do_sample": false, "eos_token_id": 2, "stop_strings": "a", "use_cache": false}),
        json!({"do_sample": true, "top_k": 1, "top_p": 0.1, "eos_token_id": -1, "pad_token_id": -1, "seed": 0}),
        json!({"cache_implementation": "quantized", "cache_config": {"backend": "quanto", "nbits": 4, "axis_key": 0,
               "axis_value": 0, "q_group_size": 16, "residual_length": 16, "device": "cpu", "compute_dtype": "float16"}}),
        json!({"cache_implementation": "quantized", "cache_config": {"backend": "HQQ", "nbits": 2, "axis_key": 1,
               "axis_value": 1}}),
        json!({"cache_implementation": "static", "max_new_tokens": 3, "num_beams": 4, "no_repeat_ngram_size": 2}),
        json!({"cache_implementation": "offloaded", "max_new_tokens": 3, "repetition_penalty": 0.5}),
        json!({"max_new_tokens": 6, "do_sample": true, "typical_p": 0.9, "epsilon_cutoff": 0.01, "eta_cutoff": 0.01, "top_h": 0.5,
               "encoder_repetition_penalty": 1.2, "no_repeat_ngram_size": 2, "encoder_no_repeat_ngram_size": 3, "min_length": 4}),
        json!({"max_new_tokens": 4, "sequence_bias": [[[3, 1], 2.5], [[5], -1.0]], "bad_words_ids": [[7], [8, 9]],
               "suppress_tokens": [1], "begin_suppress_tokens": [2], "forced_bos_token_id": 1, "forced_eos_token_id": [2]}),
        json!({"max_new_tokens": 5, "min_new_tokens": 3, "eos_token_id": 2, "exponential_decay_length_penalty": [2, 1.5],
               "remove_invalid_values": true, "renormalize_logits": true}),
        json!({"cache_implementation": "sliding_window", "temperature": 0.0, "max_new_tokens": 3}),
    ];
    let recorded = recorded.into_iter().map(|file| file.unwrap());
    recorded.chain(written.iter().map(|config| config.to_string().into_bytes())).collect()
}

fn prepare(folder: &Path) -> Run {
    let folder = copied("llama", folder, "model");
    fs::write(folder.join("tokenizer.json"), of_recorded().to_string()).unwrap();
    let model = limited(&folder, &cpu()).load().unwrap();
    let path = folder.join("generation_config.json");
    Box::new(move |input| {
        put(&path, input);
        // As arguments of a caller, and as a file of a folder.
        let Ok(Some(config)) = GenerationConfig::from_file(&path) else { return false };
        if let Ok(Value::Object(arguments)) = serde_json::from_slice(input) {
            match GenerationConfig::from_arguments(&arguments) {
                Ok(asked) => assert_eq!(asked, config),
                Err(_) => assert!(!config.not_applied().is_empty()),
            }
            assert_eq!(serde_json::from_value(Value::Object(arguments)).ok().as_ref(), Some(&config));
        }
        _ = model.generation_config().merged_with(config.clone()).resolve();
        config.not_applied();
        let plan = match config.cache_implementation.as_deref() {
            Some(name) => Plan::named(&cache_text(name, config.cache_config.as_ref())),
            None => Plan::named("dynamic"),
        };
        let plan = plan.unwrap_or_else(|_| Plan::dynamic());
        let Ok(mut cache) = model.cache(&plan) else { return false };
        if config.resolve().is_err() {
            return false;
        }
        match model.generate(PROMPT[..5].to_vec()).cache(&mut cache).config(config.clone()).stream() {
            Ok(text) => text.take(3).take_while(Result::is_ok).for_each(drop),
            Err(_) => return false,
        }
        // Several rows, whose scores are read.
        let wanted = config.max_new_tokens(3);
        let rows = vec![PROMPT[..2].to_vec(), PROMPT[..7].to_vec()];
        cache.reset();
        if let Ok(generation) = model
            .generate(rows)
            .cache(&mut cache)
            .config(wanted.clone())
            .keep_logits(true)
            .keep_scores(true)
            .steps()
        {
            generation.take(3).take_while(Result::is_ok).for_each(drop);
        }
        true
    })
}
