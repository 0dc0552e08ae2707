//! Driver faults are detected, named and survived: each is injected into a separate process that loads a
//! model as a user does.

use std::{
    io::{Read, stdin},
    ops::ControlFlow,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio, exit},
    thread::{sleep, spawn},
    time::{Duration, Instant},
};

use kiln::{
    DtypeChoice, Error, Mixture, Model, ModelBuilder,
    device::{self, DeviceClass, DeviceName, Opened},
    expert::{
        SelfTest,
        kernels::{
            Implementation,
            faults::{Fault, plant},
        },
    },
};

use crate::support::{architectures, fixtures_of, greedy, some};

/// The fault that a child process injects; empty for none.
const FAULT: &str = "KILN_TEST_FAULT";

/// The model that a child process loads.
const MODEL: &str = "KILN_TEST_MODEL";

/// The exact set of kernels that a child process must disable.
const LEFT_OUT: &str = "KILN_TEST_LEFT_OUT";

/// Whether there is a wgpu device to inject faults into; the tests modify its shaders.
fn is_tested() -> bool {
    kiln_testkit::devices::opened().iter().any(|(name, _)| name.starts_with("wgpu"))
}

fn demo() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../assets/demo")
}

fn packed(folder: &Path, mixture: Mixture) -> PathBuf {
    let file = folder.join("model.gguf");
    kiln::quantize(demo(), &file, mixture, |_| ControlFlow::Continue(())).unwrap();
    file
}

/// Starts a process that injects `fault`, loads `model` with the stored results in `home`, and must disable
/// `left_out`.
fn child(home: &Path, fault: &str, model: &Path, left_out: &str) -> Child {
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args([
        "--exact",
        "driver_faults::a_child_process_loads_a_model_with_a_planted_fault",
        "--nocapture",
    ]);
    // Mesa's compiled shaders are no part of what is tested. Compiling them takes a minute.
    if let Some(shaders) = ["MESA_SHADER_CACHE_DIR", "XDG_CACHE_HOME"]
        .iter()
        .find_map(std::env::var_os)
        .map(PathBuf::from)
        .or_else(|| std::env::home_dir().map(|home| home.join(".cache")))
    {
        child.env("MESA_SHADER_CACHE_DIR", shaders);
    }
    child.env("XDG_CACHE_HOME", home).env("HOME", home).env("KILN_TEST_DEVICES", "wgpu");
    child.env(FAULT, fault).env(MODEL, model).env(LEFT_OUT, left_out);
    child.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Runs such a process to its end and checks that it succeeds.
#[track_caller]
fn survives(home: &Path, fault: &str, model: &Path, left_out: &str) {
    let output = child(home, fault, model, left_out).wait_with_output().unwrap();
    let [out, err] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    assert!(output.status.success() && out.contains("1 passed"), "{fault}: {:?}\n{out}{err}", output.status);
}

fn planted(name: &str) -> Option<Fault> {
    let text = |shader, from, to| Some(Fault::Text { shader, from, to });
    match name.split_once(' ') {
        None if name == "turn" => text("rotary", "let s = f32(elem(sine));", "let s = -f32(elem(sine));"),
        None => None,
        Some(("crash", kernel)) => Some(Fault::Crash { kernel: kernel.to_owned().leak() }),
        Some(("hang", kernel)) => Some(Fault::Hang { kernel: kernel.to_owned().leak() }),
        Some(("loss", kernel)) => Some(Fault::Loss { kernel: kernel.to_owned().leak() }),
        Some(("format", _)) => text("linear_packed", "const OFFSET = 8.0", "const OFFSET = 7.0"),
        Some(("flush", _)) => Some(Fault::Flush),
        Some(("subnormals", _)) => {
            let lower = "unpack2x16float(words.x).x";
            text("linear_packed", lower, "select(unpack2x16float(words.x).x, 0.0, (words.x & 0x7c00u) == 0u)")
        }
        Some(other) => panic!("{other:?}"),
    }
}

fn on(opened: &Opened, when: SelfTest) -> ModelBuilder<'static> {
    let model = std::env::var_os(MODEL).unwrap();
    Model::builder(PathBuf::from(model))
        .opened(opened.clone())
        .dtype(DtypeChoice::F32)
        .exact(true)
        .self_test(when)
}

fn tokens(model: &Model) -> Vec<Vec<Option<u32>>> {
    let prompt: Vec<_> = (0..40).map(|i| (i * 37 + 5) % 2048).collect();
    let steps = model.generate(vec![prompt]).config(greedy(8)).steps().unwrap();
    steps.map(|step| step.unwrap().tokens).collect()
}

/// The test that child processes run: the model gives the tokens of the CPU, without the kernels reported as
/// faulty.
#[test]
fn a_child_process_loads_a_model_with_a_planted_fault() {
    let Ok(fault) = std::env::var(FAULT) else { return };
    if fault.starts_with("hang") {
        // Interrupts like Ctrl-C on the command line; here, the end of the input triggers it.
        spawn(|| {
            stdin().read_to_end(&mut Vec::new()).unwrap();
            kiln::expert::interrupted();
            exit(130);
        });
    }
    let cpu = device::open(DeviceName::Cpu).unwrap();
    let want = tokens(&on(&cpu, SelfTest::Never).load().unwrap());
    if let Some(fault) = planted(&fault) {
        plant(fault);
    }
    let wgpu = device::open(DeviceName::Wgpu(None)).unwrap();
    let left_out = std::env::var(LEFT_OUT).unwrap();
    if fault.starts_with("turn") {
        let verdict = on(&wgpu, SelfTest::Never).compare().unwrap().unwrap();
        assert!(
            verdict.why.is_some() && verdict.passes.iter().any(|pass| pass.cosine < 0.999),
            "{verdict:?}"
        );
        return assert_eq!(verdict.without, [left_out].into(), "{verdict:?}");
    }
    let model = on(&wgpu, SelfTest::Always).load();
    if left_out == "all" {
        let Err(Error::Device { why, .. }) = model else { panic!("{model:?}") };
        return assert!(why.contains("rms_norm, rotary") && why.contains("--device cpu"), "{why}");
    }
    let model = model.unwrap();
    assert_eq!(model.kernels().left_out().collect::<Vec<_>>().join(" "), left_out);
    assert_eq!(tokens(&model), want);
    let ran = model.kernels().ran();
    assert!(ran.iter().any(|ran| ran.implementation == Implementation::Wgsl), "others are trusted: {ran:?}");
    let is_another = model.device() != &wgpu.device;
    assert_eq!(is_another, fault.starts_with("loss"), "a device that was lost is opened again");
    assert_eq!(&device::open(DeviceName::Wgpu(None)).unwrap().device, model.device());
}

/// A comparison of the whole model detects a fault, and trials find the faulty kernel.
#[test]
fn a_fault_without_a_test_case_is_found_by_comparing_the_model() {
    if !is_tested() {
        return;
    }
    let home = tempfile::tempdir().unwrap();
    survives(home.path(), "turn", &demo(), "rotary");
}

/// No correct kernel is reported as faulty, in any type.
#[test]
fn models_of_every_architecture_agree_with_the_cpu() {
    let mut compared = 0;
    for (name, opened) in kiln_testkit::devices::opened() {
        for architecture in some(architectures()) {
            let folder = fixtures_of(architecture).join("models").join(architecture);
            for dtype in [DtypeChoice::F32, DtypeChoice::F16] {
                if dtype == DtypeChoice::F16 && !opened.info.f16 {
                    continue;
                }
                let model = Model::builder(&folder).opened(opened.clone()).dtype(dtype);
                let Some(verdict) = model.compare().unwrap() else { continue };
                println!("{name} {architecture} {verdict:?}");
                compared += 1;
                assert_eq!(verdict.why, None, "{name}: {architecture} {dtype:?}: {verdict:?}");
                assert_eq!(verdict.passes.len(), 3, "{name}: {architecture}");
            }
        }
    }
    let has_gpu =
        kiln_testkit::devices::opened().iter().any(|(_, opened)| opened.info.class != DeviceClass::Cpu);
    assert_eq!(compared > 0, has_gpu);
}

#[test]
fn kernels_that_are_wrong_for_a_format_are_not_used_with_it() {
    if !is_tested() {
        return;
    }
    let home = tempfile::tempdir().unwrap();
    survives(home.path(), "format q4_0", &packed(home.path(), Mixture::Q4_0), "linear normed_linear");
    // Models in other formats are not affected.
    survives(home.path(), "format q4_0", &demo(), "");
}

#[test]
fn kernels_that_flush_subnormal_scales_are_found_and_not_used() {
    if !is_tested() {
        return;
    }
    let home = tempfile::tempdir().unwrap();
    survives(home.path(), "subnormals q8_0", &packed(home.path(), Mixture::Q8_0), "linear normed_linear");
}

/// Subnormal scales are unpacked with integers on a device that is found, when opened, to flush them to 0.
#[test]
fn subnormal_scales_are_right_on_a_device_that_flushes_them() {
    if !is_tested() {
        return;
    }
    let home = tempfile::tempdir().unwrap();
    survives(home.path(), "flush q6_k", &packed(home.path(), Mixture::Q6K), "");
}

#[test]
fn a_crashed_kernel_is_not_launched_again_nor_any_after_three_crashes() {
    if !is_tested() {
        return;
    }
    let home = tempfile::tempdir().unwrap();
    let crashes = |kernel: &str, left_out: &str| {
        let fault = format!("crash {kernel}");
        let output = child(home.path(), &fault, &demo(), left_out).wait_with_output().unwrap();
        assert!(!output.status.success() && output.status.code().is_none(), "{:?}", output.status);
    };
    crashes("rotary", "");
    survives(home.path(), "", &demo(), "rotary");
    crashes("rms_norm", "");
    crashes("kv_append", "");
    survives(home.path(), "", &demo(), "all");
}

/// Starts a process that hangs in `kv_append`.
fn hanging(home: &Path) -> Child {
    let mut hanging = child(home, "hang kv_append", &demo(), "");
    let note = home.join("kiln/self-test.running");
    let started = Instant::now();
    while !std::fs::read_to_string(&note).unwrap_or_default().ends_with("\nkv_append") {
        assert!(started.elapsed() < Duration::from_secs(300), "it is not noted which kernel is tested");
        assert_eq!(hanging.try_wait().unwrap(), None, "it has to hang");
        sleep(Duration::from_millis(20));
    }
    hanging
}

/// Ends the process like Ctrl-C.
fn interrupt(mut hanging: Child) {
    drop(hanging.stdin.take());
    assert_eq!(hanging.wait().unwrap().code(), Some(130));
}

#[test]
fn a_kernel_that_hangs_is_not_launched_again() {
    if !is_tested() {
        return;
    }
    let home = tempfile::tempdir().unwrap();
    let mut killed = hanging(home.path());
    killed.kill().unwrap();
    killed.wait().unwrap();
    survives(home.path(), "", &demo(), "kv_append");

    // Simulates a user who has waited long enough.
    let home = tempfile::tempdir().unwrap();
    let waited = hanging(home.path());
    sleep(Duration::from_secs(11));
    interrupt(waited);
    survives(home.path(), "", &demo(), "kv_append");
}

#[test]
fn a_kernel_that_was_interrupted_early_is_launched_again() {
    if !is_tested() {
        return;
    }
    let home = tempfile::tempdir().unwrap();
    interrupt(hanging(home.path()));
    survives(home.path(), "", &demo(), "");
}

#[test]
fn a_lost_device_is_opened_again_without_the_faulty_kernel() {
    if !is_tested() {
        return;
    }
    let home = tempfile::tempdir().unwrap();
    survives(home.path(), "loss layer_norm", &demo(), "layer_norm");
    survives(home.path(), "", &demo(), "layer_norm");
}
