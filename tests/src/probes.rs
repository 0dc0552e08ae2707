//! Measurements of packed weights agree with the models.

use std::path::{Path, PathBuf};

use burn::tensor::{Tensor, activation::log_softmax};
use kiln::{
    Error, Mixture, Model, ModelBuilder, Plan, TokenId,
    device::{DeviceClass, Opened},
    expert::{
        Batch, Logits,
        probe::{check_original, probe_tensors, probe_weights},
        read_back,
    },
};

use crate::support::{Llama, fixtures, float32};

const WINDOW: usize = 24;

fn demo() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../assets/demo")
}

fn devices() -> impl Iterator<Item = (&'static str, &'static Opened)> {
    kiln_testkit::devices::opened().iter().map(|(name, opened)| (name.as_str(), opened))
}

/// Returns two windows of text, and the beginning of a third.
fn text(model: &Model) -> Vec<TokenId> {
    let text = "Friends, Romans, countrymen, lend me your ears; I come to bury Caesar, not to praise him. The evil that men \
                do lives after them; the good is oft interred with their bones; so let it be with Caesar.";
    let text = model.encode(text).unwrap();
    assert!(text.len() > 2 * WINDOW + 1);
    text[..2 * WINDOW + 5].to_vec()
}

/// Returns the log-probabilities of all tokens at all positions, `[places, vocab]`, from one pass per window.
fn logarithms(model: &Model, text: &[TokenId]) -> Vec<f32> {
    let said = |window: &[TokenId]| {
        let batch = Batch::from_rows(&[window[..window.len() - 1].to_vec()], model.device()).unwrap();
        let mut cache = model.cache(&Plan::dynamic()).unwrap();
        let logits: Tensor<3> = model.causal().forward(&batch, Logits::All, &mut cache).unwrap();
        read_back::read(log_softmax(logits, 2)).unwrap().iter::<f32>().collect::<Vec<_>>()
    };
    text.chunks(WINDOW).flat_map(said).collect()
}

fn mean_divergence(right: &[f32], other: &[f32], places: usize) -> f64 {
    let terms = right.iter().zip(other).map(|(p, q)| f64::from(*p).exp() * f64::from(p - q));
    terms.sum::<f64>() / places as f64
}

#[test]
fn losses_of_weights_are_those_of_whole_passes() {
    for (device, opened) in devices() {
        let builder = || float32(Model::builder(demo()), opened);
        let original = builder().exact(true).load().unwrap();
        let text = text(&original);
        let mixtures = [Mixture::Q8_0, Mixture::Q3KM];
        let mut shares = Vec::new();
        let mut on_progress = |share| shares.push(share);
        let probe = probe_weights(&original, &builder, &text, WINDOW, &mixtures, &mut on_progress).unwrap();
        assert!(shares.is_sorted() && shares.last() == Some(&1.0), "{shares:?}");
        let places = text.len() - text.chunks(WINDOW).count();
        assert_eq!(probe.tokens, places);

        let stored = probe.original();
        assert_eq!((stored.mixture, stored.compared.divergence, stored.compared.agreement), (None, 0.0, 1.0));
        let rounds = opened.info.class == DeviceClass::Cpu;
        let asked = mixtures.iter().flat_map(|mixture| match rounds {
            true => vec![(Some(*mixture), true), (Some(*mixture), false)],
            false => vec![(Some(*mixture), false)],
        });
        let measured = probe.weights[1..].iter().map(|one| (one.mixture, one.exact));
        assert!(measured.eq(asked), "{device}: {:?}", probe.weights);

        let right = logarithms(&original, &text);
        let mut exact = Vec::new();
        for one in &probe.weights[1..] {
            let model = builder().quant(one.mixture).exact(one.exact).load().unwrap();
            let said = logarithms(&model, &text);
            let near = |measured: f64, right: &[f32]| {
                // Both orders of summing float32 logits of a few units change the logarithms by at most 1e-5,
                // which dominates the difference if both are almost equal. The divergence is a mean of such
                // differences.
                let expected = mean_divergence(right, &said, places);
                assert!((measured - expected).abs() < 2e-5, "{one:?} on {device}: {expected:e}");
            };
            near(one.compared.divergence, &right);
            assert_eq!(one.rounding.is_some(), rounds && !one.exact, "{device}");
            if let Some(rounding) = &one.rounding {
                near(rounding.divergence, &exact);
                assert!(rounding.divergence > 0.0 && rounding.divergence < 0.01, "{device}: {rounding:?}");
            }
            assert_eq!(one.bytes, model.weight_bytes());
            exact = said;
        }
        let [eight, three] = [Mixture::Q8_0, Mixture::Q3KM]
            .map(|mixture| probe.weights.iter().find(|one| one.mixture == Some(mixture)).unwrap());
        assert!(eight.compared.divergence < three.compared.divergence && three.bytes < eight.bytes);
        // 8.5 bits for matrices, and 32 for the few numbers of norms.
        assert!(eight.bits > 8.5 && eight.bits < 8.6, "{}", eight.bits);
    }
}

#[test]
fn packing_one_kind_of_tensors_loses_less_than_packing_all() {
    for (device, opened) in devices() {
        let builder = || float32(Model::builder(demo()), opened);
        let original = builder().exact(true).load().unwrap();
        let text = text(&original);
        let mixture = Mixture::Q3KM;
        let all = probe_weights(&original, &builder, &text, WINDOW, &[mixture], &mut |_| ()).unwrap();
        let tensors = probe_tensors(&original, &builder, &text, WINDOW, mixture, 3, &mut |_| ()).unwrap();

        let mut kinds: Vec<_> = tensors.kinds.iter().map(|kind| (kind.name.as_str(), kind.tensors)).collect();
        kinds.sort_unstable();
        let blocks = original.sizes().layers;
        let expected = ["attn_k", "attn_output", "attn_q", "attn_v", "ffn_down", "ffn_gate", "ffn_up"];
        let expected = expected.map(|kind| (kind, blocks)).into_iter().chain([("token_embd", 1)]);
        assert!(kinds.iter().copied().eq(expected), "{kinds:?}");

        let lost = all.weights[1].compared.divergence;
        for one in tensors.kinds.iter().chain(&tensors.worst) {
            let alone = one.compared.divergence;
            assert!(alone > 0.0 && alone < lost, "{} on {device}: {alone:e} of {lost:e}", one.name);
            // 3 bits have steps of about half a standard deviation, and 6 bits an eighth of that.
            let expected = if one.formats == ["q6_k"] { 0.005..0.05 } else { 0.02..0.3 };
            assert!(expected.contains(&one.relative_error), "{one:?}");
        }
        assert_eq!(tensors.worst.len(), 3);
        for all in [&tensors.kinds, &tensors.worst] {
            assert!(all.is_sorted_by(|a, b| a.compared.divergence >= b.compared.divergence), "{all:?}");
        }
    }
}

/// The reported error equals that of numbers that are packed and unpacked here.
#[test]
fn errors_of_tensors_equal_those_of_packing_their_numbers() {
    let (_, opened) = &kiln_testkit::devices::opened()[0];
    let builder = || float32(Model::builder(demo()), opened);
    let original = builder().load().unwrap();
    let text = text(&original);
    let tensors = probe_tensors(&original, &builder, &text, WINDOW, Mixture::Q4_0, 0, &mut |_| ()).unwrap();
    assert!(tensors.worst.is_empty());

    let bytes = std::fs::read(demo().join("model.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let (mut squares, mut errors) = (0.0, 0.0);
    for name in file.names().into_iter().filter(|name| name.contains("down_proj")) {
        let tensor = file.tensor(name).unwrap();
        let stored = match tensor.dtype() {
            safetensors::Dtype::F16 => kiln_weights::Format::F16,
            safetensors::Dtype::BF16 => kiln_weights::Format::Bf16,
            _ => kiln_weights::Format::F32,
        };
        let mut numbers = vec![0.0; tensor.shape().iter().product()];
        stored.unpack(tensor.data(), &mut numbers).unwrap();
        let format = kiln_weights::Format::Q4_0;
        let mut packed = vec![0; format.bytes_of(numbers.len()).unwrap()];
        format.pack(&numbers, &mut packed).unwrap();
        let mut unpacked = vec![0.0; numbers.len()];
        format.unpack(&packed, &mut unpacked).unwrap();
        for (number, unpacked) in numbers.iter().zip(&unpacked) {
            squares += f64::from(*number).powi(2);
            errors += (f64::from(*unpacked) - f64::from(*number)).powi(2);
        }
    }
    let kind = tensors.kinds.iter().find(|kind| kind.name == "ffn_down").unwrap();
    let expected = f64::sqrt(errors / squares);
    // Sums in double precision in another order.
    assert!((kind.relative_error / expected - 1.0).abs() < 1e-9, "{} is not {expected}", kind.relative_error);
}

#[test]
fn quantized_random_and_speech_models_cannot_be_probed() {
    let (_, opened) = &kiln_testkit::devices::opened()[0];
    let why = |e: Error| e.to_string();
    let folder = tempfile::tempdir().unwrap();
    let packed = folder.path().join("packed.gguf");
    kiln::quantize(demo(), &packed, Mixture::Q8_0, |_| std::ops::ControlFlow::Continue(())).unwrap();
    let message = why(check_original(&packed).unwrap_err());
    assert!(message.contains("is stored as Q8_0") && message.contains("name the original"), "{message}");
    kiln::quantize(demo(), &packed, Mixture::F16, |_| std::ops::ControlFlow::Continue(())).unwrap();
    check_original(&packed).unwrap();

    check_original(fixtures("5.23.0-experts").join("models/mixtral")).unwrap();
    let whisper = fixtures("5.23.0-whisper").join("models/whisper_multilingual");
    assert!(why(check_original(whisper).unwrap_err()).contains("model of speech"));

    let original = float32(Model::builder(demo()), opened).load().unwrap();
    let sizes = Llama { layers: 1, hidden: 32, heads: 1, kv_heads: 1, intermediate: 32, vocab: 97 };
    let random = || ModelBuilder::random(sizes.config()).opened(opened.clone());
    let refused = |builder: &dyn Fn() -> ModelBuilder<'static>, text: &[TokenId], window: usize| {
        why(probe_weights(&original, builder, text, window, &[Mixture::Q8_0], &mut |_| ()).unwrap_err())
    };
    assert!(refused(&random, &[1, 2, 3], 8).contains("is made up"));
    let named = || float32(Model::builder(demo()), opened);
    assert!(refused(&named, &[1], 8).contains("two tokens"));
    assert!(refused(&named, &[1, 2, 3], 1).contains("window"));
}
