//! Feeds numbered tokens to layers, and recognizes them in views.

use std::ops::Range;

use burn::tensor::{Device, FloatDType, Tensor, TensorData};
use kiln::expert::kernels::KvUnpack;
use kiln::expert::memory::{DenseKv, KvLayer, KvSpan, KvView, PackedBuffer, PackedView, Positions};

use super::Subject;

/// Head dimension.
pub const DIM: usize = 8;

/// Feeds tokens `range` to a layer of two heads. Returns the tokens that the view holds.
pub(super) fn push(subject: &Subject<'_>, layer: &mut dyn KvLayer, range: Range<usize>) -> Vec<f32> {
    if range.is_empty() {
        return Vec::new();
    }
    let (keys, values) = feed(subject, layer, keys(subject.device, range));
    tokens_of(subject, keys, values)
}

/// Feeds keys in as many pieces as the layer accepts. Returns the keys and values of the last view, in order.
/// Every view is compared with its promised span.
pub(super) fn feed(
    subject: &Subject<'_>,
    layer: &mut dyn KvLayer,
    keys: Tensor<4>,
) -> (Tensor<4>, Tensor<4>) {
    let (mut start, len) = (0, keys.dims()[2]);
    loop {
        let n = layer.limits().at_once.unwrap_or(len).min(len - start);
        assert!(n > 0, "{subject:?} takes no token at all");
        let span = layer.span(n);
        let piece = keys.clone().narrow(2, start, n);
        let view = update(subject, layer, piece).unwrap();
        start += n;
        let seen = in_order(subject, view, span);
        if start == len {
            return seen;
        }
    }
}

/// Returns the keys and values of a view, ordered by position.
fn in_order(subject: &Subject<'_>, view: KvView, span: KvSpan) -> (Tensor<4>, Tensor<4>) {
    let PackedView { packed, end, recent, rotation } = match view {
        KvView::Dense(recent) => PackedView { packed: None, end: 0, recent, rotation: None },
        KvView::Packed(view) => *view,
        KvView::Chained(chain) => {
            let ends = chain.iter().skip(1).map(|next| next.origin).chain([span.start + span.len]);
            let spans: Vec<_> = chain.iter().zip(ends).map(|(kv, end)| kv.start..end).collect();
            assert_eq!(spans.first().map(|first| first.start), Some(span.start), "{subject:?}");
            let (keys, values) = chain
                .into_iter()
                .zip(spans)
                .map(|(kv, Range { start, end })| {
                    assert_eq!(kv.origin, start, "{subject:?}: a buffer begins with its first slot");
                    kv.in_order(KvSpan { start, len: end - start })
                })
                .unzip();
            return (Tensor::cat(keys, 2), Tensor::cat(values, 2));
        }
    };
    assert!(recent.start <= span.start, "{subject:?} hides what it promised");
    let begin = if packed.is_some() { end.max(span.start) } else { span.start };
    let behind = KvSpan { start: begin, len: span.start + span.len - begin };
    assert!(recent.keys.dims()[2] >= behind.len, "{subject:?} has no place for {behind:?}");
    let (keys, values) = recent.in_order(behind);
    let (keys, values) = match packed {
        Some(packed) if begin > span.start => {
            let on_device: Vec<i64> = packed.end.into_data().iter().collect();
            assert_eq!(on_device, [end as i64], "{subject:?} says the same to kernels");
            let unpack = |buffer: &PackedBuffer, packing| {
                subject.kernels.run(KvUnpack {
                    buffer: buffer.clone(),
                    packing,
                    head_dim: DIM,
                    slots: 0..buffer.slots(),
                    dtype: FloatDType::F32,
                })
            };
            let old = DenseKv {
                keys: unpack(&packed.keys, packed.key_packing),
                values: unpack(&packed.values, packed.value_packing),
                start: 0,
                origin: packed.origin,
                shared: None,
            };
            let (k, v) = old.in_order(KvSpan { start: span.start, len: begin - span.start });
            (Tensor::cat(vec![k, keys], 2), Tensor::cat(vec![v, values], 2))
        }
        _ => (keys, values),
    };
    let back = |x: Tensor<4>| match &rotation {
        Some(matrix) => x.matmul(matrix.clone().unsqueeze()),
        None => x,
    };
    (back(keys), back(values))
}

pub(super) fn update(
    subject: &Subject<'_>,
    layer: &mut dyn KvLayer,
    keys: Tensor<4>,
) -> kiln::Result<KvView> {
    let [rows, _, n, _] = keys.dims();
    let positions = Positions::all_at(layer.span(n).query(n), rows, subject.device);
    layer.update(keys.clone(), values_of(keys), &positions)
}

/// Returns the tokens that keys and values belong to, after checking that they are complete and match.
pub(super) fn tokens_of(subject: &Subject<'_>, keys: Tensor<4>, values: Tensor<4>) -> Vec<f32> {
    let [_, _, len, _] = keys.dims();
    assert_eq!(keys.dims(), values.dims(), "{subject:?}");
    let (keys, values) = (floats(keys), floats(values));
    // Tokens are whole numbers, so that they can be recognized in spite of quantization loss.
    let tokens = keys[..DIM * len].chunks(DIM).map(|vector| vector[0].round()).collect::<Vec<f32>>();
    for (i, (key, value)) in keys.iter().zip(&values).enumerate() {
        let (head, slot, dim) = (i / (DIM * len) % 2, i / DIM % len, i % DIM);
        if i / (2 * DIM * len) == 0 {
            let lost = (key - element(tokens[slot], head, dim)).abs();
            assert!(lost <= subject.loss, "{subject:?}: key {i} is off by {lost}");
        }
        let lost = (value + key).abs();
        assert!(lost <= 2.0 * subject.loss, "{subject:?}: value {i} is off by {lost}");
    }
    tokens
}

/// Returns the number that represents token `t` in a head and dimension; it is `t` itself in the first of
/// both.
fn element(t: f32, head: usize, dim: usize) -> f32 {
    t + head as f32 / 4.0 + dim as f32 / 2.0
}

/// Returns values that differ from their keys, so that neither can be mistaken for the other.
pub(super) fn values_of(keys: Tensor<4>) -> Tensor<4> {
    -keys
}

/// Returns the keys of tokens `range`, `[1, 2, tokens, DIM]`.
pub(super) fn keys(device: &Device, range: Range<usize>) -> Tensor<4> {
    let shape = [1, 2, range.len(), DIM];
    let of = |head| range.clone().flat_map(move |t| (0..DIM).map(move |dim| element(t as f32, head, dim)));
    Tensor::from_data(TensorData::new([0, 1].into_iter().flat_map(of).collect::<Vec<_>>(), shape), device)
}

pub(super) fn floats<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().iter::<f32>().collect()
}
