//! Rows of different lengths in one cache: each sees what it sees alone.

use burn::tensor::Tensor;
use kiln::expert::{
    ModelCache,
    kernels::KvAppend,
    memory::{BlockKeys, Positions, RowPosition, SharedRows, StepShape},
};

use super::{
    Subject,
    feeding::{in_order, keys, tokens_of, values_of},
};

/// A row in a cache of its own.
struct Alone {
    cache: ModelCache,
    next: usize,
}

/// Checks that rows that join a cache, share it, are saved or copied, and leave see what they see alone.
/// `build` creates caches of one block for the subject. Returns whether rows shared a buffer.
pub fn rows_conform(subject: &Subject<'_>, build: &dyn Fn() -> ModelCache) -> bool {
    // Below, at and above the windows and residuals of the samples.
    let row = |(first, n)| fed(subject, build(), first, n);
    let mut alone = Vec::from([(0, 9), (40, 3), (60, 26)].map(row));
    let mut together = row((0, 9)).cache;
    for other in [(40, 3), (60, 26)] {
        together.join(row(other).cache).unwrap();
    }
    let mut shared = steps(subject, &mut together, &mut alone, 4);
    let mut copy = together.snapshot();
    steps(subject, &mut copy, &mut copies_of(&alone), 2);
    let mut restored = build();
    restored.restore(together.save().unwrap()).unwrap();
    steps(subject, &mut restored, &mut copies_of(&alone), 2);
    if subject.exact {
        let mut legacy = build();
        let Alone { cache, next } = row((10, 20));
        let layers = cache.to_legacy().unwrap();
        let swapped = layers.iter().map(|(keys, values)| (values.clone(), keys.clone())).collect();
        assert!(build().from_legacy(swapped).is_err(), "{subject:?}: keys in place of values");
        legacy.from_legacy(layers).unwrap();
        steps(subject, &mut legacy, &mut [Alone { cache, next }], 3);
    }
    // A row from the middle leaves, and joins again as the last one.
    let (mut left, mut own) = (together.leave(1).unwrap(), vec![alone.remove(1)]);
    steps(subject, &mut together, &mut alone, 2);
    steps(subject, &mut left, &mut own, 3);
    together.join(left).unwrap();
    alone.append(&mut own);
    shared |= steps(subject, &mut together, &mut alone, 8);
    shared
}

fn copies_of(rows: &[Alone]) -> Vec<Alone> {
    rows.iter().map(|row| Alone { cache: row.cache.snapshot(), next: row.next }).collect()
}

/// Feeds `n` tokens from `first` on to a new cache.
fn fed(subject: &Subject<'_>, mut cache: ModelCache, first: usize, n: usize) -> Alone {
    for token in first..first + n {
        feed(subject, &mut cache, &[token]);
    }
    Alone { cache, next: first + n }
}

/// Feeds `n` tokens to each row, together and alone, and compares what each token sees. Returns whether rows
/// shared a buffer.
fn steps(subject: &Subject<'_>, together: &mut ModelCache, alone: &mut [Alone], n: usize) -> bool {
    let mut is_shared = false;
    for _ in 0..n {
        let tokens: Vec<usize> = alone.iter().map(|row| row.next).collect();
        let (got, shared) = feed(subject, together, &tokens);
        is_shared |= shared;
        for ((row, token), got) in alone.iter_mut().zip(tokens).zip(got) {
            let (want, _) = feed(subject, &mut row.cache, &[token]);
            assert_eq!(got, want[0], "{subject:?}: a row sees what it sees alone");
            row.next += 1;
        }
    }
    is_shared
}

/// Feeds one token to each row. Returns the tokens that each row then sees, and whether rows share a buffer.
fn feed(subject: &Subject<'_>, cache: &mut ModelCache, tokens: &[usize]) -> (Vec<Vec<f32>>, bool) {
    let step = StepShape { rows: tokens.len(), tokens: 1, element: 4, last: false };
    cache.share_buffers(&step, 0).unwrap();
    let mut pass = cache.begin(&step, &vec![0; tokens.len()], false, 0).unwrap();
    let new = |rows: &std::ops::Range<usize>| {
        let keys = tokens[rows.clone()].iter().map(|&token| keys(subject, token..token + 1)).collect();
        Tensor::cat(keys, 0)
    };
    let seen_by = |keys: &Tensor<4>, values: &Tensor<4>, row: usize| {
        tokens_of(subject, keys.clone().narrow(0, row, 1), values.clone().narrow(0, row, 1))
    };
    let mut seen = Vec::new();
    let is_shared = match pass.keys(0).unwrap() {
        BlockKeys::Apart(parts) => {
            for part in parts {
                let (span, keys) = (part.layer.span(1), new(&part.rows));
                let positions = Positions::all_at(span.query(1), part.rows.len(), subject.device);
                let view = part.layer.update(keys.clone(), values_of(subject, keys), &positions).unwrap();
                let (keys, values) = in_order(subject, view, span);
                seen.extend((0..part.rows.len()).map(|row| seen_by(&keys, &values, row)));
            }
            false
        }
        BlockKeys::Shared(SharedRows { buffers, parts }) => {
            for part in parts {
                let (first, keys) = (part.layer.span(1).query(1), new(&part.rows));
                let base = |row: usize| part.base + row * part.slots;
                let place = |row| RowPosition { first, base: base(row), visible_from: 0 };
                let positions = Positions::new((0..part.rows.len()).map(place).collect(), subject.device);
                let new = [keys.clone(), values_of(subject, keys)];
                let buffers_of_all = buffers.take().unwrap().into();
                let append = KvAppend { buffers: buffers_of_all, new, positions, origin: 0 };
                let [keys, values] = subject.kernels.run(append);
                for row in 0..part.rows.len() {
                    let own = |tensor: &Tensor<4>| tensor.clone().narrow(2, base(row), first + 1);
                    seen.push(seen_by(&own(&keys), &own(&values), 0));
                }
                *buffers = Some((keys, values));
                part.layer.stored(1);
            }
            true
        }
    };
    pass.commit();
    (seen, is_shared)
}
