//! Mixtures of experts: which weights are read, and which are not.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use burn::tensor::{DType, Int, Tensor, TensorData};
use kiln::{
    ModelBuilder, Plan, RandomMixtral,
    device::Opened,
    kernels::{Choice, ExpertLinear, Kernels, Matrix, MatrixStack},
};
use tracing::{
    Event, Metadata, Subscriber,
    field::{Field, Visit},
    span,
};

use crate::support::{alone, batch, float32, floats, forward, is_alone};

const SIZES: RandomMixtral = RandomMixtral {
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

/// Adds up the bytes that the code for the CPU says it has read of experts.
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
fn decode_reads_the_weights_of_chosen_experts_alone() {
    // In a process of its own: threads that do not listen turn off what this one listens to.
    if !is_alone() {
        alone("experts::decode_reads_the_weights_of_chosen_experts_alone", None);
        return;
    }
    let RandomMixtral { layers, hidden, intermediate, experts, chosen, .. } = SIZES;
    let expert = (3 * hidden * intermediate * 4) as u64;
    for (device, opened) in devices() {
        let model = float32(ModelBuilder::random(&SIZES), opened).load().unwrap();
        let idle = (layers * (experts - chosen)) as u64 * expert;
        let embeddings = (97 * hidden * 4) as u64;
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
        // Each expert once, however many tokens go to it.
        let prompt = (0..60).map(|i| i * 31 % 97).collect();
        assert!(feed(&[prompt]) <= (layers * experts) as u64 * expert);
    }
}

/// Where no token goes, weights are not numbers. They are in no product.
#[test]
fn other_experts_change_nothing() {
    let (experts, output, input, chosen) = (6, 70, 36, 3);
    for (device, opened) in devices() {
        for choice in Choice::ALL {
            let Ok(kernels) = Kernels::new(choice, &opened.device) else { continue };
            // Few tokens, and many.
            for tokens in [1, 16, 50] {
                let weights: Vec<f32> = (0..experts * output * input)
                    .map(|i| if i / (output * input) == chosen { (i % 7) as f32 - 3.0 } else { f32::NAN })
                    .collect();
                let all = Tensor::<2>::from_data(
                    TensorData::new(weights, [experts * output, input]),
                    (&opened.device, DType::F32),
                );
                let weight = MatrixStack::read([experts, output, input], 100, |range| {
                    Ok::<_, kiln::Error>(Matrix::Dense(all.clone().narrow(0, range.start, range.len())))
                });
                let goes_to = TensorData::new(vec![chosen as i32; tokens * 2], [1, tokens, 2]);
                let y = kernels.run(ExpertLinear {
                    x: Tensor::ones([1, tokens, 1, input], (&opened.device, DType::F32)),
                    weight: weight.unwrap(),
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
