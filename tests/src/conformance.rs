//! The recorded cases, on every device and with every kind of kernel.

use kiln::{Offload, Plan, device::DeviceName, expert::kernels::Choice};
use kiln_testkit::conformance::{Line, Outcome, Setup, Summary};

use crate::support::{cases_are, fixtures, run_cases, some, some_on};

fn run(version: &str, filter: &str, setup: &Setup) -> (Vec<Line>, Summary) {
    run_wanted(version, &mut |name| name.contains(filter), setup)
}

fn run_wanted(version: &str, wanted: &mut dyn FnMut(&str) -> bool, setup: &Setup) -> (Vec<Line>, Summary) {
    let mut lines = Vec::new();
    let summary = run_cases(&fixtures(version), wanted, setup, &mut |line| {
        if matches!(line.outcome, Outcome::Failed { .. }) {
            eprintln!("{} {line}", setup.device.info.name);
        }
        lines.push(line.clone());
    });
    (lines, summary)
}

/// Cases that this build must pass, as prefixes of their names.
const MUST: &[&str] = &[
    "llama/greedy_dynamic",
    "llama/greedy_nocache",
    "llama/greedy_leftpad_b2",
    "llama/chunked_dynamic",
    "llama/prefix_reuse",
    "llama/repetition_penalty",
    "llama_rope_linear/greedy",
    "llama_rope_dynamic/greedy",
    "llama_rope_llama3/greedy",
    "llama_rope_yarn/greedy",
    "llama_tied/greedy",
    "llama/greedy_static",
    "llama/greedy_static_leftpad_b2",
    "llama/chunked_static",
    "llama/greedy_quantized_quanto_4",
    "llama/greedy_quantized_quanto_2",
    "llama/greedy_quantized_hqq_8",
    "llama/greedy_quantized_hqq_4",
    "llama/beam4",
    "llama/beam3_leftpad_b2",
    "llama/beam3_eos_True",
    "llama/beam3_eos_False",
    "llama/beam3_eos_never",
    "llama/beam3_static",
    "gemma/beam3",
    "quant/quant.quanto.4.axis-1.float16",
    "quant/quant.hqq.1.axis0.float32",
    "mistral/greedy_short",
    "mistral/greedy_long",
    "mistral/leftpad_b2",
    "qwen2/greedy_long",
    "gemma/leftpad_b2",
    "gemma2/greedy_long",
    "mamba/greedy",
    "mamba/greedy_short",
    "mamba/greedy_nocache",
    "mamba/leftpad_b2",
    "whisper/greedy_forward_loop",
    "jamba/greedy",
    "jamba/leftpad_b2",
    "jamba/beam3",
    "mel/log_mel_80",
    "mel/log_mel_128",
    "proc/top_p",
    "proc/repetition_penalty",
];

/// Cases that only version 4.47 has, or has right.
const MUST_4_47: &[&str] = &[
    "llama/sink_12_4",
    "llama/sink_16_2",
    "llama/sink_10_0",
    "llama/group_beam_4_2_leftpad_b2",
    "llama/group_beam_5_5",
    "llama/group_beam_6_3",
    "llama/constrained",
];
const MUST_5_23: &[&str] = &[
    "mistral/greedy_static",
    "phi3/greedy_static",
    "gemma2/leftpad_b2",
    "gemma2/greedy_static",
    "qwen3/leftpad_b2",
    "gemma3_text/greedy_long",
    "gemma3_text/leftpad_b2",
];

/// Cases of the rotary position folder that must not be skipped: lengths that cross the trained one, and a
/// `head_dim` of 80.
const MUST_ROPE: &[&str] = &[
    "llama_rope_longrope_short/greedy_cross",
    "llama_rope_longrope_long/greedy_long_prompt",
    "llama_rope_longrope_nofactor/greedy_leftpad_cross",
    "llama_rope_dynamic_other/greedy_cross",
    "llama_rope_yarn_mscale/greedy_long",
    "llama_rope_llama3_other/greedy",
    "llama_wide/chunked_dynamic",
];

/// Required cases of the Mamba folder.
const MUST_MAMBA: &[&str] = &[
    "mamba_other/greedy_short",
    "mamba_other/greedy_long",
    "mamba_other/beam3",
    "falcon_mamba/greedy",
    "falcon_mamba/leftpad_b2",
];

/// Required cases of the folder with mixtures of experts.
const MUST_EXPERTS: &[&str] = &[
    "mixtral/greedy_long",
    "mixtral/chunked_dynamic",
    "mixtral_window/greedy_long",
    "mixtral_window/beam3",
    "qwen2_moe/greedy_long",
    "qwen2_moe/leftpad_b2",
    "qwen2_moe/chunked_dynamic",
    "qwen2_moe_other/greedy_b2",
    "qwen2_moe_other/beam3",
    "qwen3_moe/greedy_b2",
    "qwen3_moe/chunked_dynamic",
    "qwen3_moe_other/greedy",
    "qwen3_moe_other/leftpad_b2",
    "jamba_other/greedy_long",
    "jamba_other/leftpad_b2",
];

/// Required cases of the folder with long recordings.
const MUST_WHISPER: &[&str] = &[
    "whisper_multilingual/detected",
    "whisper_multilingual/translated",
    "whisper_multilingual/prompted_and_conditioned",
    "whisper_multilingual/unspoken_below_2.0",
    "whisper_multilingual/long",
    "whisper_multilingual/beams",
    "whisper_multilingual/token_times",
];

/// All folders of recordings.
const VERSIONS: [&str; 12] = [
    "4.47.1",
    "5.23.0",
    "5.23.0-rope",
    "5.23.0-mamba",
    "5.23.0-experts",
    "5.23.0-decoders",
    "5.23.0-states",
    "5.23.0-gemma4",
    "5.23.0-embeddings",
    "5.23.0-adapters",
    "5.23.0-multimodal",
    "5.23.0-whisper",
];

/// Whether a case ran. On some devices, some quantized cases depend on a rounding error; the runner verifies
/// this before it reports it.
fn ran(line: &Line) -> bool {
    matches!(line.outcome, Outcome::Ok { .. } | Outcome::Differs { .. })
}

/// Returns the required cases of a folder, as prefixes. `None` means all of them.
fn required(version: &str) -> Option<Vec<&'static str>> {
    Some(match version {
        "4.47.1" => [MUST, MUST_4_47].concat(),
        "5.23.0" => [MUST, MUST_5_23].concat(),
        "5.23.0-mamba" => MUST_MAMBA.to_vec(),
        "5.23.0-experts" => MUST_EXPERTS.to_vec(),
        "5.23.0-whisper" => MUST_WHISPER.to_vec(),
        "5.23.0-rope" => MUST_ROPE.to_vec(),
        _ => return None,
    })
}

/// With `KILN_TEST_CASES=some`, only the required cases run on GPUs, and every fourth of folders that require
/// all.
#[test]
fn every_case_passes_or_is_not_implemented_yet() {
    for (name, device) in kiln_testkit::devices::opened() {
        let some = cases_are("some") && name != "cpu";
        let setup = Setup::on(device);
        for version in VERSIONS {
            let required = required(version);
            let mut number = 0;
            let mut wanted = |name: &str| {
                number += 1;
                match &required {
                    _ if !some => true,
                    Some(required) => required.iter().any(|must| name.starts_with(must)),
                    None => number % 4 == 0,
                }
            };
            let (lines, summary) = run_wanted(version, &mut wanted, &setup);
            assert_eq!(summary.failed, 0, "on {}", device.info.name);
            if required.is_none() {
                assert!(
                    !lines.is_empty() && lines.iter().all(ran),
                    "{version}: all run on {}",
                    device.info.name
                );
            }
            for must in required.iter().flatten() {
                let passed = |l: &Line| l.name.starts_with(must) && ran(l);
                assert!(lines.iter().any(passed), "{version}: {must} did not run on {}", device.info.name);
            }
        }
    }
}

#[test]
fn exact_caches_pass_the_cases_of_dynamic() {
    for (_, device) in kiln_testkit::devices::opened() {
        for cache in ["static", "static:len=64", "sink:window=100,sinks=4"] {
            let cache = Some(Plan::named(cache).unwrap());
            let setup = Setup { cache, ..Setup::on(device) };
            for model in
                ["llama/greedy_dynamic", "llama/prefix_reuse", "gemma3_text/greedy", "qwen3/leftpad_b2"]
            {
                // Rows of different lengths cannot share sinks.
                if model.ends_with("leftpad_b2")
                    && setup.cache.as_ref().unwrap().global.strategy.name == "sink"
                {
                    continue;
                }
                let (_, summary) = run("5.23.0", model, &setup);
                assert!(summary.passed > 0 && summary.failed == 0, "{model}: {summary}");
            }
        }
    }
}

#[test]
fn cases_pass_with_other_choices_of_kernels() {
    for (name, device) in kiln_testkit::devices::opened() {
        let choices: &[Choice] = match name.as_str() {
            "cpu" => &[Choice::Reference],
            "wgpu" => &[Choice::Reference, Choice::Cube],
            _ => &[Choice::Reference],
        };
        for &kernels in choices {
            let setup = Setup { kernels, ..Setup::on(device) };
            for (version, filter) in [
                ("5.23.0", "llama/greedy_leftpad"),
                ("5.23.0", "llama_tied/"),
                ("5.23.0", "llama/chunked_dynamic"),
                ("5.23.0-experts", "qwen2_moe/chunked_dynamic"),
                ("5.23.0-experts", "qwen3_moe/chunked_dynamic"),
                ("5.23.0", "jamba/leftpad"),
            ] {
                let (_, summary) = run(version, filter, &setup);
                assert_eq!((summary.passed, summary.failed), (1, 0), "{kernels} on {name}: {filter}");
            }
        }
    }
}

/// Of each block, no expert stays on the device, or one, or all.
#[test]
fn cases_pass_with_experts_in_host_memory() {
    for (name, device) in kiln_testkit::devices::opened() {
        for resident in some_on(name, [1, 0, 100]) {
            let setup = Setup { resident_experts: Some(resident), ..Setup::on(device) };
            let (lines, summary) = run("5.23.0-experts", "", &setup);
            assert_eq!((summary.passed, summary.failed), (lines.len(), 0), "{resident} on {name}");
            let (_, summary) = run("5.23.0", "jamba/greedy", &setup);
            assert!(summary.passed > 0 && summary.failed == 0, "{resident} on {name}: jamba, {summary}");
        }
    }
}

#[test]
fn cases_pass_with_experts_that_the_cpu_computes() {
    for (name, device) in kiln_testkit::devices::opened().iter().filter(|(name, _)| name != "cpu") {
        let setup = Setup { experts_on: Some(DeviceName::Cpu), ..Setup::on(device) };
        for (version, filter) in some([
            ("5.23.0-experts", ""),
            ("5.23.0", "jamba/greedy"),
            ("5.23.0-decoders", "gpt_oss"),
            ("5.23.0-decoders", "deepseek_v3"),
            ("5.23.0-decoders", "llama4_text"),
            ("5.23.0-gemma4", "gemma4_text/"),
            ("5.23.0-states", "nemotron_h"),
        ]) {
            let (lines, summary) = run(version, filter, &setup);
            assert!(summary.passed > 0 && lines.iter().all(ran), "{filter} on {name}: {summary}");
        }
    }
}

#[test]
fn the_cases_of_another_model_fail() {
    // A runner that cannot fail proves nothing: the cases of one model are run on the weights of another.
    let folder = tempfile::tempdir().unwrap();
    let from = fixtures("5.23.0");
    for file in ["cases.json", "tensors.safetensors"] {
        std::fs::copy(from.join(file), folder.path().join(file)).unwrap();
    }
    let to = folder.path().join("models/llama");
    std::fs::create_dir_all(&to).unwrap();
    for file in ["config.json", "generation_config.json", "model.safetensors"] {
        // The same shapes with other rotary frequencies.
        std::fs::copy(from.join("models/llama_rope_linear").join(file), to.join(file)).unwrap();
    }
    let (_, device) = &kiln_testkit::devices::opened()[0];
    let setup = Setup::on(device);
    let summary =
        run_cases(folder.path(), &mut |name| name.contains("llama/greedy_dynamic"), &setup, &mut |_| {});
    assert_eq!(summary.failed, 1);
}

/// Rows are permuted in every cache, on the device and on the host, and also in a cache that retains nothing.
#[test]
fn beam_search_cases_pass_with_other_caches() {
    for (_, device) in kiln_testkit::devices::opened() {
        for (cache, offload) in [
            ("static", None),
            ("static:len=64", None),
            ("sink:window=100,sinks=4", None),
            ("none", None),
            ("dynamic", Some(Offload::All)),
            ("static", Some(Offload::AllBut(1))),
        ] {
            let cache = Some(Plan::named(cache).unwrap());
            let setup = Setup { cache, offload, ..Setup::on(device) };
            for (version, case) in [
                ("5.23.0", "llama/beam3_eos"),
                ("4.47.1", "llama/group_beam_6_3"),
                ("5.23.0", "gemma2/beam3"),
            ] {
                let (_, summary) = run(version, case, &setup);
                assert!(summary.passed > 0 && summary.failed == 0, "{case}: {summary}");
            }
        }
    }
}
