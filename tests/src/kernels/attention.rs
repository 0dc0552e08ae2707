//! The definition of attention, in plain loops.

use std::ops::Range;

use burn::tensor::{DType, FloatDType, Int, Tensor, TensorData};
use kiln::expert::{
    kernels::{Attention, AttentionPacked, AttentionShape, Checked, Choice, Kernel, Kernels, KvUnpack},
    memory::{DenseKv, PackedBuffer, Packing, Positions},
    read_back,
};

const SHAPE: AttentionShape =
    AttentionShape { scale: 1.0, softcap: None, window: None, causal: true, end: None, latent: false };

fn numbers<const D: usize>(tensor: &Tensor<D>) -> Vec<f64> {
    read_back::read(tensor.clone()).unwrap().iter().collect()
}

/// Returns the slot of a position in a ring buffer.
fn slot(position: usize, origin: usize, slots: usize) -> usize {
    (position as i64 - origin as i64).rem_euclid(slots as i64) as usize
}

/// Computes `softmax(scale · q kᵀ) v`, one query at a time. `oldest` returns the first position that a row
/// holds; `at` returns the key and value of a head (over all rows) at a position; `sinks` has the score of a
/// key without a value for each head.
fn loops<'a>(
    q: &Tensor<4>,
    [kv_heads, width]: [usize; 2],
    (positions, shape): (&Positions, &AttentionShape),
    sinks: Option<Tensor<1>>,
    oldest: impl Fn(usize) -> usize,
    at: impl Fn(usize, usize) -> [&'a [f64]; 2],
) -> TensorData {
    let [batch, heads, new, head_dim] = q.dims();
    let (q, sinks) = (numbers(q), sinks.as_ref().map(numbers));
    let mut results = Vec::with_capacity(batch * heads * new * width);
    for vector in 0..batch * heads * new {
        let (head, i) = (vector / new, vector % new);
        let row = positions.on_host[head / heads];
        let query = row.first + if shape.causal { i } else { 0 };
        let window = shape.window.map_or(0, |window| (query + 1).saturating_sub(window));
        let first = oldest(head / heads).max(window).max(row.visible_from);
        let last = shape.end.map_or(query, |end| query.min(end - 1));
        let seen: Vec<_> = (first..=last).map(|position| at(head / (heads / kv_heads), position)).collect();
        let q = &q[vector * head_dim..][..head_dim];
        let score = |[key, value]: &[&[f64]; 2]| {
            let key = key.iter().chain(value.iter().filter(|_| shape.latent));
            let score = q.iter().zip(key).map(|(q, k)| q * k).sum::<f64>() * shape.scale;
            shape.softcap.map_or(score, |cap| cap * (score / cap).tanh())
        };
        let scores: Vec<f64> = seen.iter().map(score).collect();
        let sink = sinks.as_ref().map(|sinks| sinks[head % heads]);
        let most = scores.iter().copied().chain(sink).fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = scores.iter().copied().chain(sink).map(|score| (score - most).exp()).sum();
        let mut result = vec![0.0; width];
        for ([_, value], score) in seen.iter().zip(scores) {
            let weight = (score - most).exp() / sum;
            result.iter_mut().zip(*value).for_each(|(result, value)| *result += weight * value);
        }
        results.extend(result);
    }
    TensorData::new(results, [batch, heads, new, width])
}

fn dense(Attention { q, chain, positions, shape, sinks }: Attention) -> TensorData {
    let ([_, kv_heads, _, width], slots) = (chain[0].values.dims(), chain[0].slots());
    let head_dim = chain[0].keys.dims()[3];
    let new = q.dims()[2];
    let alone = chain.len() == 1;
    let behind = if shape.causal { new } else { 1 };
    let start = chain[0].start;
    let buffers: Vec<_> = chain.iter().map(|kv| [&kv.keys, &kv.values].map(numbers)).collect();
    let oldest = |row: usize| match alone {
        // The slots hold the latest positions.
        true => {
            let end = positions.on_host[row].first + behind;
            start.max(shape.end.map_or(end, |keys| end.min(keys)).saturating_sub(slots))
        }
        false => start,
    };
    let at = |head: usize, position: usize| {
        let (kv, numbers) =
            chain.iter().zip(&buffers).rfind(|(kv, _)| alone || kv.origin <= position).unwrap();
        let slots = kv.keys.dims()[2];
        let vector =
            head * slots + positions.on_host[head / kv_heads].base + slot(position, kv.origin, slots);
        let [keys, values] = numbers;
        [&keys[vector * head_dim..][..head_dim], &values[vector * width..][..width]]
    };
    loops(&q, [kv_heads, width], (&positions, &shape), sinks, oldest, at)
}

fn packed(AttentionPacked { q, packed, recent, positions, shape, sinks }: AttentionPacked) -> TensorData {
    let ([_, kv_heads, slots, _], head_dim) = (packed.keys.codes.dims(), recent.keys.dims()[3]);
    let width = recent.values.dims()[3];
    let unpacked = |buffer: &PackedBuffer, packing: Packing, head_dim: usize| {
        let (buffer, dtype) = (buffer.clone(), FloatDType::F32);
        numbers(&KvUnpack { buffer, packing, head_dim, slots: 0..slots, dtype }.reference())
    };
    let codes = [
        unpacked(&packed.keys, packed.key_packing, head_dim),
        unpacked(&packed.values, packed.value_packing, width),
    ];
    let later = [&recent.keys, &recent.values].map(numbers);
    let end = read_back::read(packed.end.clone()).unwrap().iter::<i64>().next().unwrap() as usize;
    let at = |head: usize, position: usize| {
        let (numbers, origin, slots) = match position < end {
            true => (&codes, packed.origin, slots),
            false => (&later, recent.origin, recent.keys.dims()[2]),
        };
        let vector = head * slots + slot(position, origin, slots);
        let [keys, values] = numbers;
        [&keys[vector * head_dim..][..head_dim], &values[vector * width..][..width]]
    };
    let oldest = |_| recent.start.max(end.saturating_sub(slots));
    loops(&q, [kv_heads, width], (&positions, &shape), sinks, oldest, at)
}

#[test]
fn attention_of_the_reference_equals_plain_loops() {
    let devices = kiln_testkit::devices();
    let (_, cpu) = devices.iter().find(|(name, _)| name == "cpu").expect("references run on the CPU");
    for dtype in [DType::F32, DType::F16] {
        for case in Attention::cases() {
            let inputs = case.inputs(cpu, dtype).checked();
            let got = read_back::read(inputs.clone().reference()).unwrap();
            assert_eq!(case.difference(dtype, &got, &dense(inputs)), None, "{dtype:?}: {case:?}");
        }
        for case in AttentionPacked::cases() {
            let inputs = case.inputs(cpu, dtype).checked();
            let got = read_back::read(inputs.clone().reference()).unwrap();
            assert_eq!(case.difference(dtype, &got, &packed(inputs)), None, "{dtype:?}: {case:?}");
        }
    }
}

/// More groups of rows than there are counters for, by which the last of their workgroups is known.
#[test]
fn many_heads_equal_some_heads() {
    const HEADS: usize = 1100;
    for (name, device) in kiln_testkit::devices() {
        let kernels = Kernels::new(Choice::Auto, &device).unwrap();
        let numbers = |tokens: usize, factor: i64| {
            let numbers = Tensor::<1, Int>::arange(0..(HEADS * tokens * 4) as i64, &device);
            let numbers = (numbers * factor).remainder_scalar(101).float().cast(DType::F32) / 50.0 - 1.0;
            numbers.reshape([1, HEADS, tokens, 4])
        };
        let (q, keys, values) = (numbers(1, 7), numbers(300, 11), numbers(300, 13));
        let of = |heads: Range<usize>| {
            let [q, keys, values] =
                [&q, &keys, &values].map(|all| all.clone().narrow(1, heads.start, heads.len()));
            let kv = DenseKv { keys, values, start: 0, origin: 0, shared: None };
            let positions = Positions::all_at(299, 1, &device);
            let attention = Attention { q, chain: vec![kv], positions, shape: SHAPE, sinks: None };
            read_back::read(kernels.run(attention)).unwrap().try_into_vec::<f32>().unwrap()
        };
        let parts = [of(0..400), of(400..HEADS)].concat();
        assert!(parts == of(0..HEADS), "{name}: heads differ");
    }
}

/// CUDA skips a launch whose input has no memory, and later those that read what it would have written.
#[test]
fn attention_is_computed_after_the_device_refused_it() {
    const SLOTS: usize = 4096;
    for (name, device) in kiln_testkit::devices().iter().filter(|(name, _)| name.starts_with("cuda")) {
        let kernels = Kernels::new(Choice::Auto, device).unwrap();
        let of = |q: Tensor<4>| {
            let keys = || Tensor::<4>::ones([1, 2, SLOTS, 8], (device, DType::F32));
            let kv = DenseKv { keys: keys(), values: keys() * 3.0, start: 0, origin: 0, shared: None };
            let positions = Positions::all_at(SLOTS - 1, 1, device);
            read_back::read(kernels.run(Attention {
                q,
                chain: vec![kv],
                positions,
                shape: SHAPE,
                sinks: None,
            }))
        };
        let query = || Tensor::<4>::ones([1, 4, 1, 8], (device, DType::F32));
        let wanted = of(query()).unwrap();
        assert!(wanted.iter::<f32>().all(|number| (number - 3.0).abs() < 1e-5), "{name}: {wanted}");
        // 4 PiB.
        let too_large = Tensor::<4>::zeros([1 << 20, 1 << 18, 1 << 9, 8], (device, DType::F32));
        let refused = of(too_large.narrow(0, 0, 1).narrow(1, 0, 4).narrow(2, 0, 1));
        assert!(refused.is_err(), "{name}: {refused:?}");
        assert_eq!(of(query()).unwrap(), wanted, "{name}");
    }
}
