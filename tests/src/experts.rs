//! Mixtures of experts: which weights are read and which are not.

use std::{
    fmt,
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use burn::tensor::{DType, Int, Tensor, TensorData};
use kiln::{
    Model, ModelBuilder, Plan,
    device::{DeviceName, Opened},
    expert::{
        ConfigFile, ExpertTraffic,
        kernels::{
            Arithmetic, Choice, ExpertLinear, Kernels, Matrix, MatrixStack, PackedLayout, PackedMatrix, Use,
        },
    },
};
use kiln_weights::Format;
use serde_json::json;
use tracing::{
    Event, Metadata, Subscriber,
    field::{Field, Visit},
    span,
};

use crate::support::{TINY, alone, batch, float32, floats, forward, is_alone};

/// Sizes of a Mixtral with random weights.
#[derive(Clone, Copy, Debug)]
struct Mixtral {
    layers: usize,
    hidden: usize,
    heads: usize,
    kv_heads: usize,
    /// Width of each expert.
    intermediate: usize,
    experts: usize,
    /// Experts that a token goes to.
    chosen: usize,
    vocab: usize,
}

impl Mixtral {
    fn config(self) -> ConfigFile {
        ConfigFile::from_json(json!({
            "model_type": "mixtral",
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "intermediate_size": self.intermediate,
            "num_local_experts": self.experts,
            "num_experts_per_tok": self.chosen,
            "vocab_size": self.vocab,
            "max_position_embeddings": 1 << 20,
        }))
    }
}

const SIZES: Mixtral = Mixtral {
    layers: 3,
    hidden: 32,
    heads: 4,
    kv_heads: 2,
    intermediate: 20,
    experts: 7,
    chosen: 2,
    vocab: 97,
};

fn devices() -> impl Iterator<Item = (&'static str, &'static Opened)> {
    kiln_testkit::devices::opened().iter().map(|(name, opened)| (name.as_str(), opened))
}

/// Sums the bytes of expert weights that the CPU kernels report as read.
#[derive(Clone, Default)]
struct Read(Arc<AtomicU64>);

impl Subscriber for Read {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target() == "kiln::kernels"
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    fn event(&self, event: &Event<'_>) {
        struct Bytes<'a>(&'a AtomicU64);

        impl Visit for Bytes<'_> {
            fn record_debug(&mut self, _: &Field, _: &dyn fmt::Debug) {}

            fn record_u64(&mut self, field: &Field, value: u64) {
                if field.name() == "read" {
                    self.0.fetch_add(value, Ordering::Relaxed);
                }
            }
        }

        event.record(&mut Bytes(&self.0));
    }

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}
}

#[test]
fn decode_reads_only_the_weights_of_chosen_experts() {
    // Runs in a separate process: threads without a subscriber would disable the events that this one listens
    // to.
    if !is_alone() {
        alone("experts::decode_reads_only_the_weights_of_chosen_experts", None);
        return;
    }
    let Mixtral { layers, hidden, intermediate, experts, chosen, .. } = SIZES;
    let expert = (3 * hidden * intermediate * 4) as u64;
    for (device, opened) in devices() {
        let model = float32(ModelBuilder::random(SIZES.config()), opened).load().unwrap();
        let idle = (layers * (experts - chosen)) as u64 * expert;
        // On the CPU, matrices are filled up to a multiple of 16 rows.
        let rows = if device == "cpu" { 112 } else { 97 };
        let embeddings = (rows * hidden * 4) as u64;
        assert_eq!(model.weight_bytes() - model.multiplied_bytes(), idle + embeddings, "on {device}");
        if device != "cpu" {
            continue;
        }
        let mut cache = model.cache(&Plan::dynamic()).unwrap();
        let mut feed = |rows: &[Vec<u32>]| {
            let read = Read::default();
            let batch = batch(&model, rows);
            tracing::subscriber::with_default(read.clone(), || forward(&model, &batch, &mut cache));
            read.0.load(Ordering::Relaxed)
        };
        for token in [5, 9, 60] {
            assert_eq!(feed(&[vec![token]]), (layers * chosen) as u64 * expert, "token {token}");
        }
        // Each expert is read once, however many tokens it processes.
        let prompt = (0..60).map(|i| i * 31 % 97).collect();
        assert!(feed(&[prompt]) <= (layers * experts) as u64 * expert);
    }
}

fn in_host_memory(resident: usize, opened: &Opened) -> Model {
    float32(ModelBuilder::random(SIZES.config()), opened).offload_experts(resident).load().unwrap()
}

#[test]
fn experts_in_host_memory_are_copied_when_tokens_need_them() {
    let Mixtral { layers, hidden, intermediate, experts, chosen, .. } = SIZES;
    let expert = (3 * hidden * intermediate * 4) as u64;
    let of_step = (layers * chosen) as u64;
    for (device, opened) in devices() {
        let whole = float32(ModelBuilder::random(SIZES.config()), opened).load().unwrap();
        assert_eq!((whole.host_weight_bytes(), whole.expert_traffic()), (0, None));
        let traffic = |resident: usize, rows: &[&[u32]]| {
            let model = in_host_memory(resident, opened);
            let away = (layers * experts) as u64 * expert;
            assert_eq!(model.host_weight_bytes(), away, "on {device}");
            assert_eq!(model.weight_bytes(), whole.weight_bytes() - away, "on {device}");
            assert_eq!(model.multiplied_bytes(), whole.multiplied_bytes(), "on {device}");
            assert_eq!(model.parameters(), whole.parameters());
            let mut cache = model.cache(&Plan::none()).unwrap();
            for row in rows {
                forward(&model, &batch(&model, &[row.to_vec()]), &mut cache);
            }
            model.expert_traffic().unwrap()
        };
        let of = |used, copied| ExpertTraffic { used, copied, bytes: copied * expert };
        // The same token is routed to the same experts.
        assert_eq!(traffic(0, &[&[5], &[5]]), of(2 * of_step, 2 * of_step), "on {device}");
        assert_eq!(traffic(chosen, &[&[5], &[5]]), of(2 * of_step, of_step), "on {device}");
        // If one expert stays, the other must be copied again each time.
        let ExpertTraffic { used, copied, .. } = traffic(1, &[&[5], &[5], &[5]]);
        assert_eq!(used, 3 * of_step);
        assert!((2 * of_step..3 * of_step).contains(&copied), "{copied} on {device}");
        // All experts are used at some time, and each is copied once.
        let prompt: Vec<u32> = (0..97).collect();
        let ExpertTraffic { copied, .. } = traffic(experts, &[&prompt, &[5], &prompt, &[9]]);
        assert!(copied <= (layers * experts) as u64, "{copied} on {device}");
    }
}

#[test]
fn steps_are_not_captured_with_experts_in_host_memory() {
    for (device, opened) in devices() {
        let model = in_host_memory(2, opened);
        let whole = float32(ModelBuilder::random(SIZES.config()), opened).load().unwrap();
        assert!(whole.causal().can_be_captured() && !model.causal().can_be_captured());
        // More tokens than are needed to record a step, in a cache that supports capturing.
        let plan = Plan::named("static").unwrap();
        let mut cache = model.cache(&plan).unwrap();
        let request = model.generate(vec![vec![1, 2, 3]]).cache(&mut cache).max_new_tokens(12).compile(true);
        let steps = request.steps().unwrap().map(|step| step.map(drop));
        assert_eq!(steps.filter(Result::is_ok).count(), 12, "on {device}");
    }
}

#[test]
fn experts_in_host_memory_are_not_counted_as_device_memory() {
    for (device, opened) in devices().filter(|(device, _)| *device != "cpu") {
        let sizes = Mixtral { layers: 4, hidden: 512, intermediate: 512, experts: 32, ..SIZES };
        let load = |resident: Option<usize>| {
            let model = float32(ModelBuilder::random(sizes.config()), opened).memory(250 << 20);
            model.offload_experts(resident).load()
        };
        // The experts take 384 MiB in total, 3 MiB each.
        let error = load(None).unwrap_err().to_string();
        assert!(error.contains("the model's weights"), "on {device}: {error}");
        let model = load(Some(4)).unwrap();
        assert_eq!(model.host_weight_bytes(), 384 << 20);
        assert!(model.budget().used() >= 48 << 20, "those that stay are counted");
        let error = load(Some(20)).unwrap_err().to_string();
        assert!(error.contains("the model's weights"), "on {device}: {error}");
    }
}

fn computed_by_the_cpu(opened: &Opened) -> ModelBuilder<'static> {
    float32(ModelBuilder::random(SIZES.config()), opened).experts_on(DeviceName::Cpu)
}

#[test]
fn experts_that_the_cpu_computes_take_no_device_memory_and_are_not_captured() {
    for (device, opened) in devices() {
        let whole = float32(ModelBuilder::random(SIZES.config()), opened).load().unwrap();
        let model = computed_by_the_cpu(opened).load().unwrap();
        let both = model.weight_bytes() + model.host_weight_bytes();
        assert_eq!(both, whole.weight_bytes(), "on {device}");
        if device == "cpu" {
            assert!(model.host_weight_bytes() == 0 && model.causal().can_be_captured());
            continue;
        }
        assert!(model.host_weight_bytes() > 0 && !model.causal().can_be_captured());
        assert_eq!(model.expert_traffic(), None, "weights stay where they are");
        let plan = Plan::named("static").unwrap();
        let mut cache = model.cache(&plan).unwrap();
        let request = model.generate(vec![vec![1, 2, 3]]).cache(&mut cache).max_new_tokens(12).compile(true);
        let steps = request.steps().unwrap().map(|step| step.map(drop));
        assert_eq!(steps.filter(Result::is_ok).count(), 12, "on {device}");
        // The experts take 384 MiB, and there is room for the rest alone.
        let sizes = Mixtral { layers: 4, hidden: 512, intermediate: 512, experts: 32, ..SIZES };
        let large = || float32(ModelBuilder::random(sizes.config()), opened).memory(150 << 20);
        assert!(large().load().is_err(), "on {device}");
        let model = large().experts_on(DeviceName::Cpu).load().unwrap();
        assert_eq!(model.host_weight_bytes(), 384 << 20, "on {device}");
    }
}

#[test]
fn impossible_places_of_experts_are_errors() {
    for (device, opened) in devices() {
        let error = |model: ModelBuilder<'_>| model.load().unwrap_err().to_string();
        let dense = float32(ModelBuilder::random(TINY.config()), opened).experts_on(DeviceName::Cpu);
        assert!(error(dense).contains("no experts"), "on {device}");
        let both = computed_by_the_cpu(opened).offload_experts(1);
        assert!(error(both).contains("leave one of them out"), "on {device}");
        let other = float32(ModelBuilder::random(SIZES.config()), opened).experts_on(DeviceName::Auto);
        assert!(error(other).contains("takes only `cpu`"), "on {device}");
    }
}

#[test]
fn offloading_experts_of_a_model_without_experts_is_an_error() {
    for (device, opened) in devices() {
        let model = float32(ModelBuilder::random(TINY.config()), opened).offload_experts(0);
        let error = model.load().unwrap_err().to_string();
        assert!(error.contains("no experts"), "on {device}: {error}");
    }
}

/// Weights of experts that receive no token are NaN. They must not enter any product.
#[test]
fn weights_of_unchosen_experts_do_not_affect_results() {
    let (experts, output, input, chosen) = (6, 80, 36, 3);
    let shape = [experts * output, input];
    let number = |i: usize| if i / (output * input) == chosen { (i % 7) as f32 - 3.0 } else { f32::NAN };
    let numbers: Vec<f32> = (0..experts * output * input).map(number).collect();
    for (device, opened) in devices() {
        let dense =
            Tensor::<2>::from_data(TensorData::new(numbers.clone(), shape), (&opened.device, DType::F32));
        for choice in Choice::ALL {
            let Ok(kernels) = Kernels::new(choice, &opened.device) else { continue };
            // These numbers are exact in bfloat16.
            let packed = PackedLayout::for_stack(&kernels, Format::Bf16, DType::F32, output).map(|layout| {
                let mut bytes = vec![0; 2 * numbers.len()];
                Format::Bf16.pack(&numbers, &mut bytes).unwrap();
                let use_as = Use { dtype: DType::F32, arithmetic: Arithmetic::Floats };
                move |rows: Range<usize>| {
                    let of_rows = layout.words([rows.len(), input]).unwrap();
                    let mut words = vec![0; 4 * of_rows.iter().product::<usize>()];
                    let bytes = &bytes[2 * rows.start * input..2 * rows.end * input];
                    Format::Bf16.arrange(layout.order, input, bytes, &mut words).unwrap();
                    let words: Vec<i32> =
                        words.as_chunks().0.iter().map(|word| i32::from_le_bytes(*word)).collect();
                    let words =
                        Tensor::from_data(TensorData::new(words, of_rows), (&opened.device, DType::I32));
                    Matrix::Packed(PackedMatrix::new(words, layout, [rows.len(), input], use_as))
                }
            });
            let dense = |rows: Range<usize>| Matrix::Dense(dense.clone().narrow(0, rows.start, rows.len()));
            assert_eq!(packed.is_some(), choice != Choice::Reference, "{choice} on {device}");
            let stack = |matrix: &dyn Fn(Range<usize>) -> Matrix| {
                MatrixStack::read([experts, output, input], 100, |rows| Ok::<_, kiln::Error>(matrix(rows)))
                    .unwrap()
            };
            let stacks = [Some(stack(&dense)), packed.map(|packed| stack(&packed))];
            // Few tokens and many.
            for (weight, tokens) in
                stacks.iter().flatten().flat_map(|weight| [1, 16, 50].map(|tokens| (weight, tokens)))
            {
                let goes_to = TensorData::new(vec![chosen as i32; tokens * 2], [1, tokens, 2]);
                let y = kernels.run(ExpertLinear {
                    x: Tensor::ones([1, tokens, 1, input], (&opened.device, DType::F32)),
                    weight: weight.clone(),
                    experts: Tensor::<3, Int>::from_data(goes_to, (&opened.device, DType::I32)),
                });
                let row = |row: usize| {
                    let first = (chosen * output + row) * input;
                    (first..first + input).map(|i| (i % 7) as f32 - 3.0).sum::<f32>()
                };
                for (i, got) in floats(y).into_iter().enumerate() {
                    assert_eq!(got, row(i % output), "{choice} on {device}, {tokens} tokens, element {i}");
                }
            }
        }
    }
}
