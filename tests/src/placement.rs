//! Models whose blocks are on several stages: on one device they compute the bits of a model on one stage,
//! and on devices of two kinds the same numbers within rounding.

use burn::tensor::{Tensor, TensorData};
use kiln::{
    DtypeChoice, EXACT_ROWS, Engine, Error, Event, GenerationConfig, Layers, Model, ModelBuilder, Plan,
    Request, RequestId, Result, Step, Steps, TokenId,
    device::{self, DeviceClass, Opened},
    expert::{Batch, Logits, read_back::block_on},
};

use crate::{
    laws::plans_on,
    support::{Llama, assert_close, cases_are, fixtures_of, float32, floats, greedy, recorded, some_on},
};

fn devices() -> impl Iterator<Item = (&'static str, &'static Opened)> {
    kiln_testkit::devices::opened().iter().map(|(name, opened)| (name.as_str(), opened))
}

/// Loads the recorded model `name` with its last blocks, from number `first` on, on another stage.
fn staged(name: &str, first: usize, device: &Opened, second: &Opened) -> Model {
    let folder = fixtures_of(name).join("models").join(name);
    float32(Model::builder(folder), device).stage(first, second.clone()).load().unwrap()
}

/// Requests of each kind of search, with one row and with several.
fn requests(model: &Model, plan: &Plan) -> Vec<Request<'static>> {
    let prompt = |len: usize| (0..len as TokenId).map(|i| (7 * i + 3) % 97).collect::<Vec<_>>();
    let of = |prompts: Vec<Vec<TokenId>>, config: GenerationConfig| {
        model.generate(prompts).config(config.eos_token_id(Vec::new())).plan(plan.clone())
    };
    let drawn = GenerationConfig::new().do_sample(true).temperature(1.3).seed(3);
    vec![
        of(vec![prompt(9), prompt(14)], greedy(9)),
        of(vec![prompt(9), prompt(14)], greedy(5)).keep_logits(true),
        of(vec![prompt(26)], drawn.top_k(20).num_return_sequences(3).max_new_tokens(7)),
        of(vec![prompt(12)], greedy(8).num_beams(3)),
        of(vec![prompt(12)], greedy(8).prompt_lookup_num_tokens(3)),
        of(vec![prompt(12)], greedy(6).guidance_scale(1.5)),
    ]
}

/// The tokens of each step, and the bits of logits that are kept.
type Outcome = Vec<(Vec<Option<TokenId>>, Vec<Vec<u32>>)>;

fn outcome(steps: Result<Steps<'_>>) -> Result<Outcome> {
    steps?.map(|step| step.map(chosen)).collect()
}

fn chosen(step: Step) -> (Vec<Option<TokenId>>, Vec<Vec<u32>>) {
    let bits = |row: Vec<f32>| row.into_iter().map(f32::to_bits).collect();
    (step.tokens, step.logits.unwrap_or_default().into_iter().map(bits).collect())
}

#[test]
fn two_stages_on_one_device_compute_the_bits_of_one() {
    for (place, (device, opened)) in devices().enumerate() {
        for name in ["llama", "gemma2", "jamba", "mistral"].into_iter().take(if place == 0 { 4 } else { 1 }) {
            let (whole, staged) = (recorded(name, opened), staged(name, 1, opened, opened));
            assert_eq!(staged.parameters(), whole.parameters());
            assert_eq!(staged.weight_bytes(), whole.weight_bytes(), "the head of {name} is not copied");
            for (text, plan, _) in plans_on(place, &whole) {
                let both = requests(&whole, &plan).into_iter().zip(requests(&staged, &plan));
                // On other devices a greedy request and one of beams, to save time.
                for (n, (want, got)) in both.enumerate().step_by(if place == 0 { 1 } else { 3 }) {
                    match outcome(want.steps()) {
                        Ok(want) => assert!(
                            outcome(got.steps()).unwrap() == want,
                            "request {n}, {text} of {name} on {device}"
                        ),
                        Err(error) => assert_eq!(
                            outcome(got.steps()).unwrap_err().to_string(),
                            error.to_string(),
                            "request {n}, {text} of {name} on {device}"
                        ),
                    }
                }
            }
        }
    }
}

#[test]
fn an_encoder_serves_the_blocks_of_all_stages() {
    for (device, opened) in devices() {
        let models = [recorded("whisper", opened), staged("whisper", 1, opened, opened)];
        let [want, got] = models.map(|model| {
            let shape = model.causal().features().unwrap();
            let number = |i: usize| ((i as f32 * 0.731).sin() * 43_758.547).fract();
            let numbers: Vec<f32> = (0..shape.bins * shape.frames).map(number).collect();
            let numbers = TensorData::new(numbers, [1, shape.bins, shape.frames]);
            let features = Some(Tensor::from_data(numbers, model.device()));
            let batch = Batch { features, ..Batch::from_rows(&[vec![1, 2, 3]], model.device()).unwrap() };
            let mut cache = model.cache(model.plan()).unwrap();
            floats(model.causal().forward(&batch, Logits::All, &mut cache).unwrap())
        });
        assert_eq!(got, want, "on {device}");
    }
}

/// The CPU computes a part of the blocks of another device, before and after them.
#[test]
fn two_kinds_of_devices_compute_one_model() {
    let cpu = device::open("cpu".parse().unwrap()).unwrap();
    for (device, opened) in devices().filter(|(_, opened)| opened.info.class != DeviceClass::Cpu) {
        // The head of gemma2 is its embeddings, once on each device.
        for name in ["gemma2", "jamba"] {
            let whole = recorded(name, opened);
            let ways = [("from", staged(name, 1, &cpu, opened)), ("to", staged(name, 2, opened, &cpu))];
            for (way, model) in ways {
                if cases_are("some") && (way == "to") != (name == "jamba") {
                    continue;
                }
                let logits = |model: &Model, plan: &Plan| {
                    let mut cache = model.cache(plan).unwrap();
                    let mut pass = |tokens: &[TokenId]| {
                        let batch = Batch::from_rows(&[tokens.to_vec()], model.device()).unwrap();
                        floats(model.causal().forward(&batch, Logits::All, &mut cache).unwrap())
                    };
                    [pass(&[5, 6, 7, 8, 9]), pass(&[1]), pass(&[2])].concat()
                };
                let plans = plans_on(1, &whole).filter(|(text, ..)| !text.contains("quantized"));
                for (text, plan, is_exact) in plans {
                    let what = format!("{text} of {name}, {way} the CPU and {device}");
                    assert_close(&logits(&model, &plan), &logits(&whole, &plan), &what);
                    if is_exact {
                        // Each kind of search runs where it does on one device. Near ties may differ.
                        let both = requests(&model, &plan).into_iter().zip(requests(&whole, &plan));
                        for (got, want) in both {
                            let (got, want) = (outcome(got.steps()), outcome(want.steps()));
                            let steps = |outcome: &Result<Outcome>| outcome.as_ref().map(Vec::len).ok();
                            assert_eq!(steps(&got), steps(&want), "{what}");
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn requests_of_an_engine_on_two_stages_equal_those_alone() {
    let cpu = device::open("cpu".parse().unwrap()).unwrap();
    for (device, opened) in devices() {
        for model in [staged("llama", 1, opened, opened), staged("llama", 1, &cpu, opened)] {
            let plan = model.plan().clone();
            let requests = || requests(&model, &plan).into_iter();
            let want: Vec<_> = requests().map(|request| outcome(request.steps()).unwrap()).collect();
            let mut engine: Engine<Steps<'static>> = model.engine(EXACT_ROWS).unwrap();
            let ids: Vec<RequestId> =
                requests().map(|request| engine.submit(request.steps().unwrap()).unwrap()).collect();
            let mut got = vec![Vec::new(); ids.len()];
            while !engine.is_idle() {
                for event in block_on(engine.step()) {
                    match event {
                        Event::Output(id, step) => {
                            let of = ids.iter().position(|own| *own == id).unwrap();
                            got[of].push(chosen(step));
                        }
                        Event::Ended(..) => {}
                        Event::Failed(id, _, error) => panic!("{id:?} on {device}: {error}"),
                    }
                }
            }
            assert!(got == want, "on {device}");
        }
    }
}

#[test]
fn caches_saved_on_one_placement_continue_on_another() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("cache.safetensors");
    for (place, (device, opened)) in devices().enumerate() {
        for name in ["llama", "jamba"] {
            let models = [recorded(name, opened), staged(name, 1, opened, opened)];
            for (from, to) in [(&models[0], &models[1]), (&models[1], &models[0])] {
                for (text, plan, _) in
                    plans_on(place, from).filter(|(_, plan, _)| plan.global.factory.remembers())
                {
                    let tokens: Vec<TokenId> = (3..20).collect();
                    let pass = |model: &Model, tokens: &[TokenId], cache: &mut _| {
                        let batch = Batch::from_rows(&[tokens.to_vec()], model.device()).unwrap();
                        crate::support::forward(model, &batch, cache)
                    };
                    let mut cache = from.cache(&plan).unwrap();
                    pass(from, &tokens, &mut cache);
                    from.save_cache(&path, &plan, &mut cache, &[tokens], &[0]).unwrap();
                    let mut loaded = to.load_cache(&path, &plan).unwrap().cache;
                    let want = pass(from, &[7], &mut cache);
                    assert_eq!(pass(to, &[7], &mut loaded), want, "{text} of {name} on {device}");
                }
            }
        }
    }
}

/// Each stage has a budget of its own if it has a device of its own.
#[test]
fn memory_that_runs_out_on_any_stage_changes_no_token() {
    let cpu = device::open("cpu".parse().unwrap()).unwrap();
    for (place, (device, opened)) in devices().enumerate() {
        let model = staged("llama", 1, opened, &cpu);
        let budgets = model.budgets();
        assert_eq!(budgets.first() == budgets.last(), opened.info.class == DeviceClass::Cpu);
        let plans = ["dynamic", "quantized", "static:len=64", "sink:window=16,sinks=2"];
        for plan in plans.into_iter().take(if place == 0 { 4 } else { 2 }) {
            let plan = Plan::named(plan).unwrap();
            let request = || requests(&model, &plan).swap_remove(0);
            let want = outcome(request().steps()).unwrap();
            for budget in budgets.iter() {
                let before = budget.allocations();
                outcome(request().steps()).unwrap();
                for n in some_on(device, 0..budget.allocations() - before) {
                    let steps = request();
                    budget.fail_allocation(n);
                    match outcome(steps.steps()) {
                        Ok(got) => assert!(got == want, "allocation {n}, {plan} on {device}"),
                        // Nothing can be offloaded yet.
                        Err(Error::OutOfMemory { .. }) => {
                            assert!(n < 4, "allocation {n}, {plan} on {device}")
                        }
                        Err(error) => panic!("allocation {n}, {plan} on {device}: {error}"),
                    }
                }
            }
            assert!(outcome(request().steps()).unwrap() == want);
        }
    }
}

#[test]
fn a_stage_without_a_block_is_refused_with_a_sentence() {
    let cpu = device::open("cpu".parse().unwrap()).unwrap();
    let tiny = Llama { layers: 2, hidden: 32, heads: 4, kv_heads: 2, intermediate: 48, vocab: 97 };
    let builder = || ModelBuilder::random(tiny.config()).opened(cpu.clone());
    let refused = |builder: ModelBuilder<'_>| builder.load().map(drop).unwrap_err().to_string();
    let beyond = refused(builder().stage(2, cpu.clone()));
    assert!(beyond.contains("block 2, and the model has 2 blocks"), "{beyond}");
    let again = refused(builder().stage(1, cpu.clone()).stage(1, cpu.clone()));
    assert!(again.contains("block 1, and the stage before begins with 1"), "{again}");
    let first = refused(builder().stage(0, cpu.clone()));
    assert!(first.contains("block 0"), "{first}");
    let experts = refused(builder().stage(1, cpu.clone()).offload_experts(1));
    assert!(experts.contains("one device"), "{experts}");
    assert!(builder().stage(1, cpu.clone()).load().is_ok());
}

/// A small model whose blocks are divided.
const SIX: Llama = Llama { layers: 6, hidden: 64, heads: 4, kv_heads: 2, intermediate: 96, vocab: 97 };

/// The number of blocks of each stage.
fn numbers(model: &Model) -> Vec<usize> {
    model.stages().blocks(SIX.layers).map(|(own, _)| own.len()).collect()
}

#[test]
fn layers_are_divided_by_numbers() {
    let cpu = device::open("cpu".parse().unwrap()).unwrap();
    let loaded = |devices: usize, layers: &str| {
        let devices = std::iter::repeat_n(cpu.clone(), devices);
        ModelBuilder::random(SIX.config()).devices(devices, layers.parse().unwrap()).load()
    };
    for (devices, layers, want) in [
        (2, "2,rest", &[2, 4][..]),
        (2, "2", &[2, 4]),
        (3, "1,2,rest", &[1, 2, 3]),
        (3, "1", &[1, 5]),
        // No block is left for the CPU, or none is on a GPU.
        (2, "99", &[6]),
        (2, "0", &[6]),
        (1, "auto", &[6]),
    ] {
        assert_eq!(numbers(&loaded(devices, layers).unwrap()), want, "{layers} on {devices}");
    }
    let refused = |devices, layers: &str| loaded(devices, layers).map(drop).unwrap_err().to_string();
    assert!(
        refused(2, "1,2,rest").contains("2 numbers, and the last of 2 devices"),
        "{}",
        refused(2, "1,2,rest")
    );
    assert!(refused(1, "2").contains("1 numbers"), "{}", refused(1, "2"));
    assert!(refused(0, "auto").contains("name at least one"), "{}", refused(0, "auto"));
}

#[test]
fn layers_that_fit_are_on_the_first_device() {
    let cpu = device::open("cpu".parse().unwrap()).unwrap();
    for (device, opened) in devices().filter(|(_, opened)| opened.info.class != DeviceClass::Cpu) {
        let model = |memory: u64| {
            let builder = ModelBuilder::random(SIX.config()).dtype(DtypeChoice::F32).memory(memory);
            builder.devices([opened.clone(), cpu.clone()], Layers::Fill).load().unwrap()
        };
        let whole = model(1 << 30);
        assert_eq!(numbers(&whole), [6], "{device}");
        let want = outcome(requests(&whole, whole.plan()).remove(0).steps()).unwrap();
        // With each MiB more, at least as many blocks are on the device, up to all; their caches fit, too.
        let mut before = 0;
        for memory in (1..).map(|n| n << 20) {
            let model = model(memory);
            let on_device = match &numbers(&model)[..] {
                [_] if model.opened().info.class == DeviceClass::Cpu => 0,
                [own] | [own, _] => *own,
                others => panic!("{others:?} on {device}"),
            };
            assert!(on_device >= before, "{on_device} on {device}, {before} with less memory");
            let got = outcome(requests(&model, model.plan()).remove(0).steps()).unwrap();
            assert_eq!(got.len(), want.len(), "{on_device} blocks on {device}");
            if on_device == SIX.layers {
                break;
            }
            before = on_device;
        }
        assert!(before > 0, "some division was between none and all, on {device}");
    }
}
