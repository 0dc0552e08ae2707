//! Quantized caches: their sizes, their losses, and refused settings.

use burn::tensor::{DType, Tensor, TensorData};
use kiln::{
    Model, Plan, QuantizedSettings, TokenId,
    device::Opened,
    expert::{
        kernels::{Attention, AttentionPacked, AttentionShape, Choice, Kernels},
        memory::{AttentionNeed, DenseKv, KvLayer, KvView, PackedView, Positions},
        probe::probe,
    },
};

use crate::support::{alone, greedy, is_alone, recorded};

fn devices() -> impl Iterator<Item = (&'static str, &'static Opened)> {
    kiln_testkit::devices::opened().iter().map(|(name, opened)| (name.as_str(), opened))
}

fn text(len: usize) -> Vec<TokenId> {
    (0..len as TokenId).map(|i| (i * 31 + i * i * 7) % 97).collect()
}

/// Counts everything: codes, scales, and space for recent tokens.
#[test]
fn quantized_caches_fit_their_size_table() {
    const TOKENS: usize = 4096;
    for head_dim in [64, 128] {
        let need = AttentionNeed::alike(2, head_dim);
        let dense = need.token_bytes(2) * TOKENS;
        for (bits, most) in [(8, 0.56), (4, 0.31), (2, 0.19)] {
            let plan = Plan::quantized(QuantizedSettings::default().nbits(bits)).unwrap();
            let (text, spec) = (plan.to_string(), plan.global);
            let computed = spec.factory.bytes(&need, TOKENS, 2);
            assert!((computed as f64) < most * dense as f64, "{text}: {computed} of {dense}");
            // The computed size equals the actual one, whether tokens are fed at once or in parts.
            for (_, opened) in devices() {
                let kernels = Kernels::new(Choice::Auto, &opened.device).unwrap();
                for parts in [vec![TOKENS], vec![1000, 1, 2000, 1095]] {
                    let mut layer = spec.factory.build(&need, &kernels).unwrap();
                    for n in parts {
                        let positions = Positions::all_at(layer.seq_len(), 1, &opened.device);
                        let x = Tensor::<4>::ones([1, 2, n, head_dim], (&opened.device, DType::F32));
                        layer.update(x.clone(), x, &positions).unwrap();
                    }
                    let held = spec.factory.bytes(&need, TOKENS, 4);
                    assert_eq!(layer.usage().device, held, "{text}");
                }
            }
        }
    }
}

#[test]
fn bytes_of_keys_and_values_of_different_shapes_are_counted() {
    const TOKENS: usize = 200;
    for (device, opened) in devices() {
        let kernels = Kernels::new(Choice::Auto, &opened.device).unwrap();
        for need in kiln_testkit::laws::attention_needs() {
            for text in [
                "static:len=256",
                "sliding",
                "quantized",
                "quantized:k=8,v=2,group=8,residual=8",
                "sink:window=8",
            ] {
                let window = (text == "sliding").then_some(64);
                let need = AttentionNeed { window, ..need.clone() };
                let factory = Plan::named(text).unwrap().global.factory;
                let mut layer = factory.build(&need, &kernels).unwrap();
                for _ in 0..TOKENS {
                    let [keys, values] = need
                        .streams()
                        .map(|stream| Tensor::<4>::ones(stream.shape(1, 1), (&opened.device, DType::F32)));
                    let positions = Positions::all_at(layer.span(1).query(1), 1, &opened.device);
                    layer.update(keys, values, &positions).unwrap();
                }
                let (held, counted) = (layer.usage().device, factory.bytes(&need, TOKENS, 4));
                // The first tokens are held twice.
                let sinks = if text.starts_with("sink") { 4 * need.token_bytes(4) } else { 0 };
                assert_eq!(held, counted + sinks, "{text} on {device}, {need:?}");
            }
        }
    }
}

/// Keys and values are rotated by matrices of their own widths, and attention undoes it.
#[test]
fn keys_and_values_of_different_widths_are_rotated_apart() {
    const TOKENS: usize = 30;
    for (device, opened) in devices() {
        let kernels = Kernels::new(Choice::Auto, &opened.device).unwrap();
        let [need, ..] = &kiln_testkit::laws::attention_needs()[..] else { unreachable!("there are some") };
        let plan = Plan::named("quantized:nbits=8,group=8,residual=8,rotate=on").unwrap();
        let mut layer = plan.global.factory.build(need, &kernels).unwrap();
        let numbers = |shape: [usize; 4], by: f32| {
            let all: Vec<f32> = (0..shape.iter().product()).map(|i| (i as f32 * by).sin()).collect();
            Tensor::<4>::from_data(TensorData::new(all, shape), &opened.device)
        };
        let (keys, values) =
            (numbers(need.keys.shape(1, TOKENS), 0.37), numbers(need.values.shape(1, TOKENS), 0.83));
        let mut seen = None;
        for at in 0..TOKENS {
            let [key, value] = [&keys, &values].map(|all| all.clone().narrow(2, at, 1));
            seen = Some(layer.update(key, value, &Positions::all_at(at, 1, &opened.device)).unwrap());
        }
        let floats = |x: Tensor<4>| x.into_data().iter::<f32>().collect::<Vec<_>>();
        let close = |got: Tensor<4>, want: Tensor<4>, what: &str| {
            let (got, want) = (floats(got), floats(want));
            assert_eq!(got.len(), want.len(), "{what} on {device}");
            let most = got.iter().zip(&want).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(most < 0.03, "{what} on {device}: {most}");
        };
        let (held_keys, held_values) = layer.gather().unwrap().unwrap();
        close(held_keys, keys.clone(), "keys");
        close(held_values, values.clone(), "values");

        let Some(KvView::Packed(view)) = seen else { unreachable!("there are packed tokens") };
        let PackedView { packed: Some(packed), recent, rotation: Some([of_keys, of_values]), .. } = *view
        else {
            unreachable!("tokens are packed and rotated")
        };
        assert_eq!((of_keys.dims(), of_values.dims()), ([24, 24], [16, 16]));
        let q = numbers([1, 4, 1, need.keys.width], 0.51);
        let positions = Positions::all_at(TOKENS - 1, 1, &opened.device);
        let shape = AttentionShape {
            scale: 0.2,
            softcap: None,
            window: None,
            causal: true,
            end: None,
            latent: false,
        };
        let rotated = q.clone().matmul(of_keys.unsqueeze());
        let got = kernels.run(AttentionPacked {
            q: rotated,
            packed,
            recent,
            positions: positions.clone(),
            shape,
            sinks: None,
        });
        let chain = vec![DenseKv { keys, values, start: 0, origin: 0, shared: None }];
        let want = kernels.run(Attention { q, chain, positions, shape, sinks: None });
        close(got.matmul(of_values.unsqueeze()), want, "attention");
    }
}

/// A decode step needs a small part of the memory of a dense copy of one layer's history; measured if the
/// device reports its reserved memory. The reference implementation, which makes such copies, shows that the
/// measurement detects them.
#[test]
fn a_step_makes_no_dense_copy_of_the_history() {
    // Not at the end of a block, where packing allocates memory.
    const TOKENS: usize = 16_392;
    if !is_alone() {
        alone("quantized::a_step_makes_no_dense_copy_of_the_history", None);
        return;
    }
    let need = AttentionNeed::alike(4, 64);
    let history = need.token_bytes(4) * TOKENS;
    for (name, opened) in devices() {
        let device = &opened.device;
        let reserved = || {
            device.sync().unwrap();
            device.memory_pool_usage().map(|usage| usage.bytes_reserved)
        };
        if reserved().is_none() {
            continue;
        }
        for (cache, choice) in [
            ("quantized", Choice::Auto),
            ("quantized:k=2,v=2", Choice::Auto),
            ("quantized:format=quanto,k=4,v=2", Choice::Auto),
            ("quantized", Choice::Reference),
        ] {
            let spec = Plan::named(cache).unwrap().global;
            let mut layer = spec.factory.build(&need, &Kernels::new(Choice::Auto, device).unwrap()).unwrap();
            let kernels = Kernels::new(choice, device).unwrap();
            let mut update = |n| {
                let positions = Positions::all_at(layer.seq_len(), 1, device);
                let x = Tensor::<4>::ones(need.keys.shape(1, n), (device, DType::F32));
                (layer.update(x.clone(), x, &positions).unwrap(), positions)
            };
            update(TOKENS);
            device.memory_cleanup();
            let before = reserved().unwrap();
            let (KvView::Packed(view), positions) = update(1) else { panic!("{cache}: nothing is packed") };
            let PackedView { packed: Some(packed), recent, .. } = *view else {
                panic!("{cache}: nothing is packed")
            };
            let q = Tensor::<4>::ones([1, 8, 1, need.keys.width], (device, DType::F32));
            let shape = AttentionShape {
                scale: 0.125,
                softcap: None,
                window: None,
                causal: true,
                end: None,
                latent: false,
            };
            let kept = packed.clone();
            let y = kernels.run(AttentionPacked { q, packed, recent, positions, shape, sinks: None });
            let more = reserved().unwrap().saturating_sub(before);
            drop((y, kept));
            let share = more as f64 / history as f64;
            println!("{name}, {cache}, {choice}: {more} bytes, {share:.3} of a dense history");
            // Memory is allocated in pages of some MiB.
            assert_eq!(share < 0.5, choice == Choice::Auto, "{name}, {cache}, {choice}: {share}");
        }
    }
}

/// In every format, with windows and rotated: eight bits lose almost nothing, and fewer bits lose more.
///
/// The bounds are 1.5 times the largest losses that `kiln probe` showed on these models (1.3e-4 nats with 8
/// bits, 3.4e-2 with 4, groups of 8 throughout). The weights are random, so the figures say little about
/// other models.
#[test]
fn losses_of_quantized_caches_stay_within_their_bounds() {
    let formats = [
        "quantized:group=8,residual=8",
        "quantized:group=8,residual=8,rotate=on",
        "quantized:group=8,residual=5,format=hqq,axis_key=1,axis_value=1",
        "quantized:group=8,residual=8,format=hqq,optimize=0.2.2",
        "quantized:group=64,residual=16,axis_key=0",
    ];
    for (place, (device, opened)) in devices().enumerate() {
        // One device runs everything, the others only the cases that differ in kernels.
        let (models, formats) = match place {
            0 => (&["llama", "mistral", "gemma2"][..], &formats[..]),
            _ => (&["mistral"][..], &formats[..2]),
        };
        for name in models {
            let model = recorded(name, opened);
            for format in formats {
                let plans = [8, 4].map(|bits| Plan::named(&format!("{format},nbits={bits}")).unwrap());
                let probed = probe(&model, &text(40), 40, &plans, &mut |_| ()).unwrap();
                let [eight, four] = [1, 2].map(|at| probed.caches[at].compared.divergence);
                assert!(eight > 0.0 && eight < 2e-4, "{format} of {name} on {device}: {eight:e}");
                assert!(eight < four && four < 0.05, "{format} of {name} on {device}: {four:e}");
            }
        }
    }
}

/// A prompt is processed with unquantized keys and values, however they are stored afterwards.
#[test]
fn a_prompt_attends_to_unquantized_keys_and_values() {
    for (device, opened) in devices() {
        let model = recorded("llama", opened);
        let first = |cache: &str| {
            let mut cache = model.cache(&Plan::named(cache).unwrap()).unwrap();
            let mut steps = model
                .generate(text(40))
                .cache(&mut cache)
                .config(greedy(2))
                .keep_logits(true)
                .steps()
                .unwrap();
            steps.next().unwrap().unwrap().logits.unwrap().remove(0)
        };
        let dense = first("dynamic");
        for cache in [
            "quantized:nbits=2,group=8,residual=8",
            "quantized:nbits=2,group=8,format=quanto,flush=requantize",
        ] {
            crate::support::assert_close(&first(cache), &dense, &format!("{cache} on {device}"));
        }
    }
}

fn tokens(model: &Model, cache: &str, prompt: Vec<TokenId>, n: usize) -> Vec<TokenId> {
    let mut cache = model.cache(&Plan::named(cache).unwrap()).unwrap();
    let steps = model.generate(prompt).cache(&mut cache).config(greedy(n)).steps().unwrap();
    steps.filter_map(|step| step.unwrap().tokens[0]).collect()
}

/// The reference fails in these cases: it packs the codes of a byte along the rows, and short prompts have
/// too few.
#[test]
fn caches_of_one_to_three_bits_work_on_short_prompts() {
    for (place, (device, opened)) in devices().enumerate() {
        let model = recorded("llama", opened);
        for bits in [1, 2, 3] {
            // The rules differ in the strategy, not in the kernels.
            for rule in ["append", "requantize"].into_iter().take(if place == 0 { 2 } else { 1 }) {
                let cache = format!("quantized:format=hqq,nbits={bits},group=16,residual=16,flush={rule}");
                for prompt in [1, 3, 10] {
                    let got = tokens(&model, &cache, text(prompt), 20);
                    assert_eq!(got.len(), 20, "{cache} after {prompt} on {device}");
                }
            }
        }
    }
}

/// Rows of a batch do not share codes.
#[test]
fn rows_of_a_batch_are_quantized_independently() {
    for (device, opened) in devices() {
        let model = recorded("llama", opened);
        for cache in
            ["quantized:nbits=4,group=8,residual=8", "quantized:nbits=3,format=hqq,group=8,residual=8"]
        {
            let together = {
                let mut held = model.cache(&Plan::named(cache).unwrap()).unwrap();
                let prompts = vec![text(20), text(21)[1..].to_vec()];
                let steps = model.generate(prompts).cache(&mut held).config(greedy(24)).steps().unwrap();
                steps.map(|step| step.unwrap().tokens).collect::<Vec<_>>()
            };
            let alone = tokens(&model, cache, text(20), 24);
            let row: Vec<TokenId> = together.iter().filter_map(|tokens| tokens[0]).collect();
            assert_eq!(row, alone, "{cache} on {device}");
        }
    }
}

#[test]
fn impossible_settings_are_errors_that_say_what_is_possible() {
    let need = |heads, width, window| AttentionNeed { window, ..AttentionNeed::alike(heads, width) };
    let refused = |text: &str, need: &AttentionNeed| match Plan::named(text) {
        Err(error) => error.to_string(),
        Ok(plan) => plan.global.factory.check(need).unwrap_err().to_string(),
    };
    let usual = need(2, 64, None);
    let narrow_values = AttentionNeed { values: need(2, 12, None).keys, ..need(2, 64, None) };
    for (text, need, said) in [
        ("quantized:nbits=5", &usual, "known: 2, 4, 8"),
        ("quantized:format=quanto,k=8", &usual, "known: 2, 4"),
        ("quantized:format=gguf", &usual, "known: kivi, quanto, hqq, fp8"),
        ("quantized:format=fp8,group=32", &usual, "leave out `group=32`"),
        ("quantized:backend=fp8,nbits=8,residual=64", &usual, "leave out `nbits=8,residual=64`"),
        ("quantized:format=fp8", &need(2, 64, Some(9)), "use another format"),
        ("quantized:format=quanto,axis_key=1", &usual, "0, -1"),
        ("quantized:residual=0", &usual, "at least 1"),
        ("quantized:group=0", &usual, "at least 1"),
        ("quantized:group=64,residual=100", &usual, "possible: 64, 128"),
        ("quantized:group=12,residual=12", &usual, "multiple of 8"),
        ("quantized:group=512", &usual, "multiple of 8"),
        ("quantized:group=64,q_group_size=64", &usual, "give one of them"),
        ("quantized:rotate=on", &need(2, 12, None), "have 12"),
        ("quantized:rotate=on", &narrow_values, "have 12"),
        ("quantized:rotate=maybe", &usual, "known: off, on, auto"),
        ("quantized:format=quanto,optimize=on", &usual, "known: off"),
        ("quantized:flush=requantize", &usual, "use quanto or hqq"),
        ("quantized:flush=requantize,format=quanto,group=48", &usual, "do not divide"),
        ("quantized:flush=requantize,format=quanto,group=32", &narrow_values, "the 24 numbers"),
        ("quantized:flush=requantize,format=quanto,axis_key=-1", &usual, "do not divide"),
        ("quantized:flush=requantize,format=quanto", &need(2, 64, Some(9)), "use `flush=append`"),
        ("quantized:compat=4.47", &usual, "flush=requantize"),
    ] {
        let why = refused(text, need);
        assert!(why.contains(said), "{text}: {why}");
    }
}

/// Rounds to the nearest of all 8-bit floats, ties to the one whose last bit is 0.
fn to_fp8(x: f32) -> f32 {
    let value = |code: u8| {
        let (exponent, mantissa) = (i32::from(code >> 3), f32::from(code & 7));
        if exponent == 0 { mantissa * 2f32.powi(-9) } else { (8.0 + mantissa) * 2f32.powi(exponent - 10) }
    };
    let distance = |code: &u8| ((value(*code) - x.abs()).abs(), code & 1);
    let nearest = (0..127).min_by(|a, b| distance(a).partial_cmp(&distance(b)).unwrap()).unwrap();
    value(nearest).copysign(x)
}

/// Numbers of one row, heads after another: many exponents, ties between codes, and zeros.
fn numbers(seed: usize, [rows, heads, tokens, width]: [usize; 4], largest: f32) -> Vec<f32> {
    let number = |i: usize| {
        let random = (i + 1).wrapping_mul(seed * 2 + 40_503) % 8191;
        let small = largest * 2f32.powi(-((random % 19) as i32)) * (1.0 + (random % 16) as f32 / 16.0) / 2.0;
        if random.is_multiple_of(3) { -small } else { small }
    };
    (0..rows * heads * tokens * width).map(number).collect()
}

#[test]
fn fp8_rounds_all_tokens_by_the_scales_of_the_first_pass() {
    let need = kiln_testkit::laws::attention_needs().remove(0);
    let spec = Plan::named("quantized:backend=fp8").unwrap().global;
    for (device, opened) in devices() {
        let kernels = Kernels::new(Choice::Auto, &opened.device).unwrap();
        let mut layer = spec.factory.build(&need, &kernels).unwrap();
        let mut all = [Vec::new(), Vec::new()];
        let mut scales = [0.0, 0.0];
        let mut copy = None;
        // The last tokens are larger than those of the first pass, and become the largest.
        for (pass, (n, largest)) in [(5, 3.0), (1, 2.0), (3, 1.0), (2, 90.0)].into_iter().enumerate() {
            let rows = 2;
            let new = need.streams().map(|stream| {
                let shape = stream.shape(rows, n);
                (shape, numbers(pass + stream.width, shape, largest))
            });
            let tensors = new.clone().map(|(shape, numbers)| {
                Tensor::<4>::from_data(TensorData::new(numbers, shape), (&opened.device, DType::F32))
            });
            let positions = Positions::all_at(layer.seq_len(), rows, &opened.device);
            let [keys, values] = tensors;
            let view = layer.update(keys, values, &positions).unwrap();
            let KvView::Dense(seen) = view else { panic!("a view of codes") };
            let seen = [seen.keys, seen.values].map(|x| x.into_data().try_to_vec::<f32>().unwrap());
            for (which, (shape, numbers)) in new.into_iter().enumerate() {
                if pass == 0 {
                    assert_eq!(seen[which], numbers, "{device}: the first pass sees numbers as they are");
                    scales[which] = numbers.iter().fold(0f32, |most, x| most.max(x.abs())) / 448.0;
                }
                all[which].push((shape, numbers));
                if pass > 0 {
                    // By row and head, the tokens of all passes.
                    let [rows, heads, _, width] = shape;
                    let of_head = |head: usize| {
                        all[which]
                            .iter()
                            .flat_map(move |([.., n, _], numbers)| &numbers[head * n * width..][..n * width])
                    };
                    let want: Vec<f32> = (0..rows * heads)
                        .flat_map(of_head)
                        .map(|x| to_fp8((x / scales[which]).clamp(-448.0, 448.0)) * scales[which])
                        .collect();
                    assert_eq!(seen[which], want, "{device}: pass {pass}");
                }
            }
            // A length within the first pass would have had other scales.
            assert_eq!(layer.rewind_point(4), 0, "{device}");
            assert_eq!(layer.rewind_point(5), 5, "{device}");
            if pass == 2 {
                copy = Some(layer.save().unwrap());
            }
        }
        // A saved layer, truncated ones and reordered rows have the same codes.
        let mut restored = spec.factory.build(&need, &kernels).unwrap();
        restored.restore(copy.unwrap()).unwrap();
        layer.truncate(9).unwrap();
        let gathered = |layer: &dyn KvLayer| {
            let (keys, values) = layer.gather().unwrap().unwrap();
            [keys, values].map(|x| x.into_data().try_to_vec::<f32>().unwrap())
        };
        assert_eq!(gathered(&*restored), gathered(&*layer), "{device}");
        layer.offload().unwrap();
        layer.reorder(&[1, 0, 1]).unwrap();
        restored.reorder(&[1, 0, 1]).unwrap();
        assert_eq!(gathered(&*restored), gathered(&*layer), "{device}");
        assert_eq!(layer.seq_len(), 9);
    }
}
