//! Products with packed weights in integers, as the user asks for them.

use std::path::{Path, PathBuf};

use burn::tensor::{DType, Tensor, TensorData, activation::log_softmax};
use kiln::{
    ArithmeticChoice, Error, Mixture, Model, ModelBuilder, Plan, TokenId,
    device::{DeviceClass, DeviceName, Opened},
    expert::{
        Batch, Logits,
        kernels::{Arithmetic, Choice, Kernels, Linear, Matrix, PackedLayout, cases::Numbers},
        probe::probe_weights,
        read_back,
    },
};

use kiln_weights::{Format, streams::Order};

use crate::support::{TINY, float32};

/// The most rows that wgpu multiplies in integers at once.
const STEP: usize = 16;

fn demo() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../assets/demo")
}

fn devices() -> impl Iterator<Item = &'static Opened> {
    kiln_testkit::devices::opened().iter().map(|(_, opened)| opened)
}

fn wgpu() -> Option<&'static Opened> {
    devices().find(|opened| matches!(opened.info.name, DeviceName::Wgpu(_)))
}

fn packed(opened: &Opened, mixture: Mixture, arithmetic: ArithmeticChoice) -> Model {
    float32(Model::builder(demo()), opened).quant(mixture).arithmetic(arithmetic).load().unwrap()
}

fn text(model: &Model) -> Vec<TokenId> {
    let text = "Friends, Romans, countrymen, lend me your ears; I come to bury Caesar, not to praise him.";
    model.encode(text).unwrap()
}

/// Log-probabilities of all tokens at all positions of each of these rows, fed a few tokens at a time.
fn logarithms(model: &Model, rows: &[&[TokenId]]) -> Vec<Vec<f32>> {
    let mut cache = model.cache(&Plan::dynamic()).unwrap();
    let mut all = vec![Vec::new(); rows.len()];
    let each = STEP / rows.len();
    for start in (0..rows[0].len()).step_by(each) {
        let end = rows[0].len().min(start + each);
        let parts: Vec<_> = rows.iter().map(|row| row[start..end].to_vec()).collect();
        let batch = Batch::from_rows(&parts, model.device()).unwrap();
        let logits: Tensor<3> = model.causal().forward(&batch, Logits::All, &mut cache).unwrap();
        for (row, all) in all.iter_mut().enumerate() {
            let own = log_softmax(logits.clone().narrow(0, row, 1), 2);
            all.extend(read_back::read(own).unwrap().iter::<f32>());
        }
    }
    all
}

/// KL divergence in nats, the mean over all positions.
fn divergence(right: &[f32], other: &[f32], places: usize) -> f64 {
    let terms = right.iter().zip(other).map(|(p, q)| f64::from(*p).exp() * f64::from(p - q));
    terms.sum::<f64>() / places as f64
}

/// The CPU rounds by the same rule, so the losses are about the same.
#[test]
fn integers_lose_on_wgpu_what_they_lose_on_the_cpu() {
    let Some(wgpu) = wgpu() else { return };
    let cpu = devices().find(|opened| opened.info.class == DeviceClass::Cpu).unwrap();
    for mixture in [Mixture::Q8_0, Mixture::Q4_0, Mixture::Q6K, Mixture::Q4KM] {
        let said = |opened, arithmetic| {
            let model = packed(opened, mixture, arithmetic);
            let text = text(&model);
            (logarithms(&model, &[&text]).remove(0), text.len())
        };
        let (exact, places) = said(cpu, ArithmeticChoice::Floats);
        let loss = |opened, arithmetic| divergence(&exact, &said(opened, arithmetic).0, places);
        let on_cpu = loss(cpu, ArithmeticChoice::Integers);
        let on_wgpu = loss(wgpu, ArithmeticChoice::Integers);
        let floats = loss(wgpu, ArithmeticChoice::Auto);
        assert!(floats.abs() < 1e-6, "{mixture}: {floats:e} in floats");
        // What no rounding loses is near 0. Two roundings of the same size lose about the same.
        assert!(on_wgpu > 1e-5 && on_wgpu < 2.0 * on_cpu, "{mixture}: {on_wgpu:e}, on the CPU {on_cpu:e}");
    }
}

#[test]
fn rows_in_integers_do_not_depend_on_rows_beside_them() {
    let Some(wgpu) = wgpu() else { return };
    for mixture in [Mixture::Q4KM, Mixture::Q8_0] {
        let model = packed(wgpu, mixture, ArithmeticChoice::Integers);
        let text = text(&model);
        let (one, other) = text.split_at(text.len() / 2);
        let len = one.len().min(other.len());
        let (one, other) = (&one[..len], &other[..len]);
        let alone = logarithms(&model, &[one]).remove(0);
        for rows in [&[one, other][..], &[other, other, other, one]] {
            let place = rows.iter().position(|row| *row == one).unwrap();
            assert!(logarithms(&model, rows)[place] == alone, "{mixture}, {} rows", rows.len());
        }
    }
}

#[test]
fn the_arithmetic_is_that_of_the_choice() {
    for opened in devices() {
        let is_cpu = opened.info.class == DeviceClass::Cpu;
        let of = |choice| *packed(opened, Mixture::Q4_0, choice).arithmetic().first();
        let natural = if is_cpu { Arithmetic::Integers } else { Arithmetic::Floats };
        assert_eq!(of(ArithmeticChoice::Auto), natural);
        assert_eq!(of(ArithmeticChoice::Floats), Arithmetic::Floats);
        if matches!(opened.info.name, DeviceName::Cuda(_)) {
            assert_eq!(of(ArithmeticChoice::Fastest), Arithmetic::Floats);
            continue;
        }
        assert_eq!(of(ArithmeticChoice::Integers), Arithmetic::Integers);
        // Either is right on a GPU.
        let fastest = of(ArithmeticChoice::Fastest);
        assert!(!is_cpu || fastest == Arithmetic::Integers);
    }
}

#[test]
fn integers_are_refused_where_nothing_is_multiplied_in_them() {
    let why = |builder: ModelBuilder<'_>| match builder.arithmetic(ArithmeticChoice::Integers).load() {
        Err(Error::Setting { name: "arithmetic", why }) => why,
        loaded => panic!("{:?}", loaded.map(|_| "loaded")),
    };
    for opened in devices().filter(|opened| opened.info.class != DeviceClass::Cpu) {
        let builder = || Model::builder(demo()).opened(opened.clone());
        let here = why(builder().quant(Mixture::Q4_0).kernels(match opened.info.name {
            DeviceName::Cuda(_) => Choice::Auto,
            _ => Choice::Cube,
        }));
        assert!(here.contains("in floats alone"), "{here}");
        if matches!(opened.info.name, DeviceName::Wgpu(_)) {
            let dense = why(builder());
            assert!(dense.contains("--quant q4_0"), "{dense}");
        }
    }
    for opened in devices() {
        let config = TINY.config();
        let random = why(ModelBuilder::random(config).opened(opened.clone()));
        assert!(random.contains("random"), "{random}");
    }
}

#[test]
fn numbers_that_are_not_finite_stay_in_their_row() {
    let Some(wgpu) = wgpu() else { return };
    let layout = PackedLayout { format: Format::Q4_0, order: Order::Rows };
    let kernels = Kernels::new(Choice::Auto, &wgpu.device).unwrap();
    for (place, broken) in [(3, f32::NAN), (40, f32::INFINITY), (63, f32::NEG_INFINITY)] {
        let mut numbers = Numbers::new(&wgpu.device, DType::F32);
        let weight = Matrix::Packed(numbers.packed_matrix([9, 64], layout, Arithmetic::Integers));
        let mut x = vec![1.0; 2 * 64];
        x[place] = broken;
        let x = Tensor::<3>::from_data(TensorData::new(x, [2, 1, 64]), &wgpu.device);
        let y = read_back::read(kernels.run(Linear { x, weight, bias: None, residual: None })).unwrap();
        let y: Vec<f32> = y.iter().collect();
        assert!(y[..9].iter().all(|number| !number.is_finite()), "{broken}: {y:?}");
        assert!(y[9..].iter().all(|number| number.is_finite()), "{broken}: {y:?}");
    }
}

#[test]
fn probes_measure_the_loss_of_integers() {
    let Some(wgpu) = wgpu() else { return };
    let builder = || float32(Model::builder(demo()), wgpu).arithmetic(ArithmeticChoice::Integers);
    let original = builder().exact(true).load().unwrap();
    let text = text(&original);
    let probe = probe_weights(&original, &builder, &text, text.len(), &[Mixture::Q8_0], &mut |_| ()).unwrap();
    let [_, exact, rounded] = &probe.weights[..] else { panic!("{:?}", probe.weights) };
    assert!(exact.exact && !rounded.exact && exact.rounding.is_none());
    let lost = rounded.rounding.as_ref().unwrap().divergence;
    assert!(lost > 1e-5 && lost < 0.01, "{lost:e}");
}
