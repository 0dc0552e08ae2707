//! Exact texts that users read, compared with the files in `snapshots`.
//!
//! `INSTA_UPDATE=always cargo test --release --test cli snapshots` rewrites these files. Review the
//! difference before you commit it.

use std::{
    io::Write,
    process::{Command, Stdio},
};

use super::{stderr, stdout};

/// One command per line, with its input before a `|`.
const REFUSED: &str = "
    nothing
    run
    run --model /nowhere x
    run --model tests/fixtures/transformers-5.23.0/models/llama x
    run --model tests/fixtures/transformers-5.23.0/models/mamba --cache sink:window=64 x
    run --model Cargo.toml x
    run --file /nowhere
    run --file /nowhere x
    run --device abacus x
    run --dtype f12 x
    run --dtype bf16 x
    run --kernels magic x
    run --kernels wgsl x
    run --memory lots x
    run --memory 5MiB x
    run --memory 8.5MiB --on-oom fail -n 150 x
    run --on-oom pray x
    run --offload=some x
    run --cache elastic x
    run --cache dynamic:len=4 x
    run --cache static:len=0 x
    run --cache static:len=3 ROMEO:whatlightisthis
    run --memory 1GiB --cache static:len=4294967296 x
    run --cache sliding x
    run --cache sink:window x
    run --cache sink:window=0 x
    run --cache sink:window=4,sinks=4 x
    run --cache sink:window=many x
    run --cache sink:windows=9 x
    run --cache quantized:nbits=5 x
    run --memory 1GiB --cache quantized:residual=4294967296 x
    run --cache-windowed elastic x
    run --cache dynamic --compat 4.47 x
    run --cache sink --compat 3.0 x
    run --cache none --save-cache cache.kv x
    run --load-cache /nowhere x
    run --load-cache Cargo.toml x
    run --save-cache /nowhere/cache.kv x
    run --save-cache tests x
    run --compile --no-compile x
    run --prefill-chunk 0 x
    run -n 0 x
    run -n=-2 x
    run --greedy --temperature 1 x
    run --temperature -1 x
    run --temperature nan x
    run --temperature 1e-40 x
    run --top-k -1 x
    run --top-p 0 x
    run --top-p 1.5 x
    run --min-p -0.1 x
    run --repetition-penalty 0 x
    run --typical-p 0 x
    run --max-time 0 x
    run --set nothing x
    run --set top_q=1 x
    run --set top_k=many x
    run --set top_k=4 --set top_k=5 x
    run --set cache_implementation=static x
    run --set eta_cutoff=1 x
    run --set bad_words_ids=[[]] x
    run --set bad_words_ids=[[99999]] x
    run --set forced_eos_token_id=99999 x
    run --set watermarking_config=strong x
    run --set watermarking_config={\"bias\":[]} x
    run --set watermarking_config={\"biass\":1} x
    run --set watermarking_config={\"greenlist_ratio\":2} x
    run --set watermarking_config={\"ngram_len\":5,\"keys\":[]} x
    run --stop= x
    run --prompt-lookup 4 --guidance-scale 2 x
    run --json-schema /nowhere x
    run --json-schema Cargo.toml x
    run --regex (a{1000}){1000} x
    run --regex a( x
    run --regex a --grammar Cargo.toml x
    run --grammar Cargo.toml x
    run --num-beams 0 x
    run --num-beams 4 --num-return-sequences 5 x
    run --num-beams 4 --num-beam-groups 3 x
    run --greedy --num-beams 4 --num-beam-groups 2 x
    run --num-beams 4 --num-beam-groups 2 --set diversity_penalty=1 --temperature 1 x
    run --greedy --num-return-sequences 2 x
    run --set early_stopping=sometimes x
    run --prompt-lookup 0 x
    run --greedy --prompt-lookup 4 --num-beams 2 x
    run --greedy --prompt-lookup 4 --cache none x
    run --greedy --prompt-lookup 4 --draft assets/demo x
    run --draft /nowhere x
    run --layers 2 x
    run --layers most x
    run --device cpu,abacus x
    run --device cpu,cpu --layers 1,2,rest x
    run --device cpu,cpu --layers 2 --offload-experts x
    run --offload-experts x
    run --offload-experts=most x
    run --experts cpu x
    run --experts wgpu x
    serve --host 0.0.0.0
    serve --port 99999
    serve --rows 0
    serve --cache elastic
    serve --reuse answers --prefix-memory none
    serve --prompt-lookup 16
    serve --api-keys /nowhere
    serve --model /nowhere
    serve --alias a --alias b
    serve --max-models 0
    serve --alias a --alias a --model assets/demo --model assets/demo
    bench --quant q8_0 --random model_type=llama,num_hidden_layers=1,hidden_size=32,num_attention_heads=2,intermediate_size=64,vocab_size=50 -n 0
    bench --offload-experts --random model_type=llama,num_hidden_layers=1,hidden_size=32,num_attention_heads=2,intermediate_size=64,vocab_size=50 -n 0
    run --draft tests/fixtures/transformers-5.23.0/models/llama_draft x
    run --set num_assistant_tokens_schedule=often x
    run --set assistant_confidence_threshold=2 x
    run --draft assets/demo --set assistant_lookbehind=0 x
    run --draft assets/demo --set target_lookbehind=0 x
    run --greedy --set force_words_ids=[[5]] x
    run --greedy --num-beams 4 --set force_words_ids=[[5,6,7]] -n 2 x
    run --greedy --num-beams 4 --set force_words_ids=[[99999]] x
    run --guidance-scale nan x
    run --negative-prompt y x
    run --set dola_layers=middle x
    run --greedy --set dola_layers=[99] x
    run --greedy --num-beams 2 --set dola_layers=low x
    run --set penalty_alpha=0.6 --set top_k=4 x
    run --greedy --set penalty_alpha=2 x
    run --greedy --set penalty_alpha=0.6 --set top_k=0 x
    run --greedy --set penalty_alpha=0.6 --num-beams 2 x
    run --greedy --set penalty_alpha=0.6 --draft assets/demo x
    run --guidance-scale 2 --negative-prompt= x
    chat --cache elastic
    chat --temperature -1
    chat --prefill-chunk 0
    chat --template nothing
    x | chat --temperature 1 --set num_return_sequences=2
    chat --model /nowhere
    chat --url ftp://nowhere
    chat --url http://127.0.0.1:9
    chat --url http://127.0.0.1:9 --num-beams 2
    chat --url http://127.0.0.1:9 --cache sink
    chat --url http://127.0.0.1:9 --grammar file
    chat --url http://127.0.0.1:9 --on-oom fail
    chat --url http://127.0.0.1:9 --quant q8_0
    /nothing | chat
    /save | chat
    /load /nowhere | chat
    /load Cargo.toml | chat
    \"\"\"never closed | chat
    quantize
    quantize /nowhere -o model.gguf
    quantize assets/demo -o model.gguf --quant q4
    quantize assets/demo -o Cargo.toml
    quantize assets/demo -o /nowhere/model.gguf
    quantize tests/fixtures/transformers-5.23.0/models/whisper -o model.gguf
    inspect /nowhere
    inspect assets/demo --batch 0
    inspect assets/demo --cache elastic
    bench --random hidden_size=32
    bench --random model_type=lama,hidden_size=32
    bench --random model_type=llama,hidden_size
    bench --random model_type=llama,hidden_size=32
    bench --random model_type=llama,num_hidden_layers=1,hidden_size=many
    bench --random model_type=llama,hidden_size=32,hidden_size=64
    bench --random model_type=llama,num_hidden_layers=1,hidden_size=0,num_attention_heads=1,intermediate_size=1,vocab_size=1
    bench --random 1,2,3
    bench --random /nowhere/config.json
    bench --random tests/fixtures/transformers-5.23.0/models/whisper
    bench --against /nowhere
    bench --snapshot
    bench -r 0
    bench --clients 2
    bench --serve --depth 3
    bench --serve -n 0
    bench --serve -n 1,2
    bench --serve --url http://127.0.0.1:9
    bench --serve --url http://127.0.0.1:9 --cache sink
    bench -o xml
    probe --cache none
    probe --plot /nowhere/loss.svg
    probe --text /nowhere
    probe --per-tensor
    probe --weights=q4
    probe --weights --cache static
    probe --weights --exact
    probe --weights --quant q4_k_m
    probe --weights --tokens 1
    probe --weights --ctx 1
    probe --weights --plot /nowhere/loss.svg
    probe --weights --model tests/fixtures/transformers-5.23.0/models/whisper
    detect x
    detect --watermark /nowhere x
    detect --watermark Cargo.toml x
    detect --watermark {\"bias\":} x
    detect --watermark {\"bias\":\"x\"} x
    detect --watermark {\"greenlist_ratio\":2} x
    detect --watermark {\"keys\":[1]} x
    detect --watermark {} x
    detect --watermark {} --model tests/fixtures/transformers-5.23.0/models/llama x
    detect --watermark {} --z-threshold high x
    completions tcsh
    man rum
";

/// Runs in the root of the repository, on the CPU, with the same line width everywhere.
fn kiln(args: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kiln"));
    command
        .args(args.split_whitespace())
        .current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
        .env("COLUMNS", "100")
        .env("KILN_DEVICE", "cpu")
        .env_remove("KILN_LOG")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

fn snapshot(name: &str, text: &str) {
    insta::with_settings!({ omit_expression => true, prepend_module_to_snapshot => false }, {
        insta::assert_snapshot!(name, text);
    });
}

#[test]
fn help_matches_its_snapshots() {
    for command in [
        "",
        "run",
        "chat",
        "devices",
        "doctor",
        "caches",
        "inspect",
        "conformance",
        "bench",
        "probe",
        "quantize",
        "transcribe",
        "embed",
        "serve",
        "detect",
        "pull",
        "list",
        "remove",
        "completions",
        "man",
    ] {
        let [short, long] = ["-h", "--help"].map(|flag| {
            // The help would print the value of the variable.
            let output = kiln(&format!("{command} {flag}"))
                .env_remove("KILN_DEVICE")
                .env_remove("KILN_SPEECH_MODEL")
                .output()
                .unwrap();
            assert!(output.status.success(), "{}", stderr(&output));
            stdout(&output)
        });
        snapshot(format!("help_{command}").trim_end_matches('_'), &long);
        if short != long {
            snapshot(&format!("help_{command}_short"), &short);
        }
    }
}

#[test]
fn tables_match_their_snapshots() {
    for (name, args) in [
        ("caches", "caches"),
        ("inspect", "inspect assets/demo --memory 1GiB"),
        ("inspect_cache", "inspect assets/demo --memory 64MiB --cache sink:window=64 --ctx 100000 --batch 3"),
    ] {
        let output = kiln(args).output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        snapshot(name, &stdout(&output));
    }
}

#[test]
fn errors_match_their_snapshot() {
    let mut said = String::new();
    for line in REFUSED.lines().map(str::trim).filter(|line| !line.is_empty()) {
        let (typed, args) = line.split_once(" | ").unwrap_or(("", line));
        let mut child = kiln(args).spawn().unwrap();
        // The process may exit before it reads anything.
        _ = child.stdin.take().unwrap().write_all(typed.as_bytes());
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{line}: {}", stderr(&output));
        said += &format!("$ {}\n{}\n", line.replace(args, &format!("kiln {args}")), stderr(&output));
    }
    snapshot("refusals", &said);
}
