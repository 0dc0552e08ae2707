//! Feeds numbered tokens to layers, and recognizes them in views.

use std::ops::Range;

use burn::tensor::{Device, FloatDType, Tensor, TensorData};
use kiln::expert::kernels::KvUnpack;
use kiln::expert::memory::{DenseKv, KvLayer, KvSpan, KvView, PackedBuffer, PackedView, Positions, Stream};

use super::Subject;

/// Feeds tokens `range` to a layer. Returns the tokens that the view holds.
pub(super) fn push(subject: &Subject<'_>, layer: &mut dyn KvLayer, range: Range<usize>) -> Vec<f32> {
    if range.is_empty() {
        return Vec::new();
    }
    let (keys, values) = feed(subject, layer, keys(subject, range));
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
pub(super) fn in_order(subject: &Subject<'_>, view: KvView, span: KvSpan) -> (Tensor<4>, Tensor<4>) {
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
            let unpack = |buffer: &PackedBuffer, packing, stream: Stream| {
                subject.kernels.run(KvUnpack {
                    buffer: buffer.clone(),
                    packing,
                    head_dim: stream.width,
                    slots: 0..buffer.slots(),
                    dtype: FloatDType::F32,
                })
            };
            let old = DenseKv {
                keys: unpack(&packed.keys, packed.key_packing, subject.need.keys),
                values: unpack(&packed.values, packed.value_packing, subject.need.values),
                start: 0,
                origin: packed.origin,
                shared: None,
            };
            let (k, v) = old.in_order(KvSpan { start: span.start, len: begin - span.start });
            (Tensor::cat(vec![k, keys], 2), Tensor::cat(vec![v, values], 2))
        }
        _ => (keys, values),
    };
    match rotation {
        Some([of_keys, of_values]) => {
            (keys.matmul(of_keys.unsqueeze()), values.matmul(of_values.unsqueeze()))
        }
        None => (keys, values),
    }
}

pub(super) fn update(
    subject: &Subject<'_>,
    layer: &mut dyn KvLayer,
    keys: Tensor<4>,
) -> kiln::Result<KvView> {
    let [rows, _, n, _] = keys.dims();
    let positions = Positions::all_at(layer.span(n).query(n), rows, subject.device);
    layer.update(keys.clone(), values_of(subject, keys), &positions)
}

/// Returns the tokens that keys and values of a row belong to, after checking that they are complete and
/// match.
pub(super) fn tokens_of(subject: &Subject<'_>, keys: Tensor<4>, values: Tensor<4>) -> Vec<f32> {
    let (len, streams) = (keys.dims()[2], subject.need.streams());
    assert_eq!([keys.dims(), values.dims()], streams.map(|stream| stream.shape(1, len)), "{subject:?}");
    let width = subject.need.keys.width;
    let both = [floats(keys), floats(values)];
    // Tokens are whole numbers, so that they can be recognized in spite of quantization loss.
    let tokens = both[0][..width * len].chunks(width).map(|vector| vector[0].round()).collect::<Vec<f32>>();
    for ((numbers, Stream { width, .. }), (sign, what)) in
        both.iter().zip(streams).zip([(1.0, "key"), (-1.0, "value")])
    {
        for (i, number) in numbers.iter().enumerate() {
            let (head, slot, channel) = (i / (width * len), i / width % len, i % width);
            let lost = (sign * number - element(tokens[slot], head, channel)).abs();
            assert!(lost <= subject.loss, "{subject:?}: {what} {i} is off by {lost}");
        }
    }
    tokens
}

/// Returns the number that represents token `t` in a head and channel; it is `t` itself in the first of both.
fn element(t: f32, head: usize, channel: usize) -> f32 {
    // Channels that share a scale stay close together.
    t + head as f32 / 4.0 + (channel % 8) as f32 / 2.0
}

/// Returns values that differ from their keys, so that neither can be mistaken for the other.
pub(super) fn values_of(subject: &Subject<'_>, keys: Tensor<4>) -> Tensor<4> {
    let [rows, _, n, _] = keys.dims();
    let shape = subject.need.values.shape(rows, n);
    let first = keys.narrow(1, 0, 1).narrow(3, 0, 1).expand(shape);
    -(first + vectors(subject.need.values, subject.device, std::iter::once(0)).expand(shape))
}

/// Returns the keys of tokens `range`, `[1, heads, tokens, width]`.
pub(super) fn keys(subject: &Subject<'_>, range: Range<usize>) -> Tensor<4> {
    vectors(subject.need.keys, subject.device, range)
}

fn vectors(
    stream: Stream,
    device: &Device,
    tokens: impl ExactSizeIterator<Item = usize> + Clone,
) -> Tensor<4> {
    let shape = stream.shape(1, tokens.len());
    let of = |head| {
        let vector = move |t| (0..stream.width).map(move |channel| element(t as f32, head, channel));
        tokens.clone().flat_map(vector)
    };
    Tensor::from_data(TensorData::new((0..stream.heads).flat_map(of).collect::<Vec<_>>(), shape), device)
}

pub(super) fn floats<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().iter::<f32>().collect()
}
