//! Inputs for comparing the implementations of attention over packed buffers.

use burn::tensor::{Int, Tensor};
use kiln_core::{
    layer::{Positions, RowPosition},
    packed::{Along, PackedKv, Packing},
    view::DenseKv,
};

use crate::{
    attention::{AttentionShape, packed::AttentionPacked},
    runtime::{choice::Implementation, kernel::INVARIANT_UP_TO},
    testing::{
        case::{Case, LARGEST, Rounding},
        numbers::{Numbers, Plain},
    },
};

pub(crate) fn cases() -> Vec<Case<AttentionPacked>> {
    let case = |given: Given| {
        let tolerance = move |want, rounding| given.tolerance(want, rounding);
        let lacks = move |path, _| path != Implementation::Native && given.width() != given.head_dim;
        Case::new(given, move |numbers| given.inputs(numbers)).without(lacks).within(tolerance)
    };
    all().into_iter().map(case).collect()
}

#[derive(Clone, Copy, Debug)]
struct Given {
    batch: usize,
    kv_heads: usize,
    /// Query heads per key head.
    group: usize,
    new: usize,
    head_dim: usize,
    /// Width of values, if it is not that of keys.
    width: Option<usize>,
    /// Whether each key is followed by its value.
    latent: bool,
    /// Bits, group size and group direction of the keys and of the values.
    keys: (usize, usize, Along),
    values: (usize, usize, Along),
    /// Slots of the packed buffers, and of the recent ones.
    slots: usize,
    recent: usize,
    /// The position of the first query, and the first position that is not packed.
    first: usize,
    end: usize,
    start: usize,
    origin: usize,
    recent_origin: usize,
    window: Option<usize>,
    softcap: Option<f64>,
    /// Whether each head has a sink.
    sinks: bool,
    /// Row `b` is padded below `pad · b`.
    pad: Option<usize>,
    /// Row `b` starts `apart · b` positions after the first row.
    apart: usize,
    /// Whether each query stands one position after the previous one, instead of all at `first`.
    causal: bool,
}

use Along::{Channels, Tokens};

/// One query after 64 packed tokens and 16 recent ones, packed as in KIVI.
const STEP: Given = Given {
    batch: 1,
    kv_heads: 2,
    group: 2,
    new: 1,
    head_dim: 64,
    width: None,
    latent: false,
    keys: (4, 32, Tokens),
    values: (4, 32, Channels),
    slots: 128,
    recent: 32,
    first: 80,
    end: 64,
    start: 0,
    origin: 0,
    recent_origin: 64,
    window: None,
    softcap: None,
    sinks: false,
    pad: None,
    apart: 0,
    causal: true,
};

fn all() -> Vec<Given> {
    let mut cases = Vec::new();
    for head_dim in [1, 8, 12, 64, 80, 96, 128, 256] {
        for (group, new) in [(1, 1), (2, 1), (4, 2), (7, 1)] {
            cases.push(Given { head_dim, group, new, ..STEP });
        }
        cases.push(Given { head_dim, keys: (2, 64, Channels), values: (2, 64, Tokens), ..STEP });
        cases.push(Given { head_dim, keys: (3, 64, Channels), values: (3, 128, Channels), ..STEP });
    }
    for bits in Packing::BITS {
        for along in [Channels, Tokens] {
            for group in [8, 24, 64] {
                let slots = if group == 24 { 96 } else { 128 };
                let base = Given { slots, end: slots / group * group, first: slots + 3, ..STEP };
                let base = Given { recent_origin: base.end, head_dim: 80, ..base };
                cases.push(Given { keys: (bits, group, along), values: (4, 8, Channels), ..base });
                cases.push(Given { keys: (8, 8, Channels), values: (bits, group, along), ..base });
                cases.push(Given {
                    keys: (bits, group, along),
                    values: (bits, group, along),
                    group: 8,
                    ..base
                });
            }
        }
    }
    for new in [1, 3, 20] {
        let base = Given { new, recent: 60, ..STEP };
        // Nothing packed, everything packed, and nothing but the queries.
        cases.push(Given { end: 0, first: 10, recent_origin: 0, ..base });
        cases.push(Given { end: 128, first: 128, ..base });
        cases.push(Given { softcap: Some(2.5), batch: 3, pad: Some(30), ..base });
        cases.push(Given { pad: Some(70), batch: 2, ..base });
        cases.push(Given { apart: 3, batch: 3, ..base });
        cases.push(Given { apart: 4, batch: 2, pad: Some(40), window: Some(30), ..base });
        cases.push(Given { pad: Some(81), batch: 2, ..base });
        cases.push(Given { start: 13, ..base });
        // Every query sees everything.
        for first in [80, 64, 123] {
            cases.push(Given { first, causal: false, batch: 2, group: 1, ..base });
        }
        for window in [1, 5, 40, 4096] {
            cases.push(Given { window: Some(window), ..base });
        }
        // Rings.
        let ring = Given { first: 500, end: 480, origin: 96, recent_origin: 7, start: 400, ..base };
        for origin in [0, 32, 96, 480] {
            cases.push(Given { origin, ..ring });
            cases.push(Given { origin, window: Some(50), batch: 2, pad: Some(430), ..ring });
        }
        // Positions that the packed ring no longer holds are invisible.
        cases.push(Given { start: 0, ..ring });
    }
    // The largest number of queries that must not depend on each other.
    for (keys, values) in [(STEP.keys, STEP.values), ((2, 64, Channels), (3, 32, Tokens))] {
        for new in [8, 16] {
            let base = Given { new, group: 3, keys, values, recent: 60, ..STEP };
            cases.push(base);
            cases.push(Given { window: Some(30), batch: 16 / new, apart: 3, head_dim: 80, ..base });
            let long =
                Given { slots: 3072, end: 2944, first: 3000, recent_origin: 2944, recent: 128, ..base };
            cases.push(long);
            cases.push(Given { window: Some(1500), group: 8, ..long });
            let ring = Given { first: 500, end: 480, origin: 96, recent_origin: 7, start: 400, ..base };
            cases.push(Given { window: Some(50), ..ring });
        }
    }
    // Values of another width.
    for (head_dim, width) in [(24, 16), (192, 128), (40, 8), (12, 30)] {
        for new in [1, 5, 20] {
            let base = Given { new, head_dim, width: Some(width), recent: 60, ..STEP };
            cases.push(base);
            cases.push(Given { batch: 2, apart: 4, pad: Some(40), window: Some(30), ..base });
            cases.push(Given { keys: (2, 64, Channels), values: (3, 32, Tokens), group: 5, ..base });
            cases.push(Given { first: 500, end: 480, origin: 96, recent_origin: 7, start: 400, ..base });
        }
    }
    for new in [1, 5, 20] {
        let base = Given { new, recent: 60, sinks: true, ..STEP };
        cases.push(base);
        cases.push(Given { batch: 2, group: 5, pad: Some(81), window: Some(30), head_dim: 12, ..base });
        cases.push(Given { keys: (2, 64, Channels), values: (3, 32, Tokens), softcap: Some(2.5), ..base });
    }
    for (new, bits) in [(1, 8), (3, 4), (20, 4)] {
        let base = Given { latent: true, batch: 2, kv_heads: 1, group: 4, new, recent: 60, ..STEP };
        let [keys, values] = [Channels, Tokens].map(|along| (bits, 32, along));
        cases.push(Given { head_dim: 96, width: Some(64), keys, values, ..base });
        cases.push(Given { head_dim: 40, width: Some(32), keys: (bits, 8, Channels), pad: Some(3), ..base });
    }
    // Long enough to be split.
    for (new, group) in [(1, 4), (5, 1), (33, 2)] {
        // For a prompt, each workgroup goes over all keys.
        let slots = if new > INVARIANT_UP_TO { 768 } else { 3072 };
        let end = slots - 128;
        let long = Given { new, group, slots, end, first: end + 56, recent: 128, recent_origin: end, ..STEP };
        cases.push(long);
        cases.push(Given { kv_heads: 1, ..long });
        cases.push(Given { head_dim: 128, batch: 2, pad: Some(500), ..long });
        cases.push(Given { window: Some(300), keys: (2, 64, Channels), ..long });
        cases.push(Given { recent: slots / 3, ..long });
        cases.push(Given { end: 32, first: 40, recent_origin: 32, ..long });
    }
    cases
}

impl Given {
    fn slot(position: usize, origin: usize, slots: usize) -> usize {
        (position as i64 - origin as i64).rem_euclid(slots as i64) as usize
    }

    /// The positions that query `i` of `row` sees.
    fn seen(&self, row: usize, i: usize) -> std::ops::RangeInclusive<usize> {
        let query = self.first + row * self.apart + if self.causal { i } else { 0 };
        let kept = self.end.saturating_sub(self.slots);
        let window = self.window.map_or(0, |window| (query + 1).saturating_sub(window));
        let pad = self.pad.map_or(0, |pad| row * pad);
        self.start.max(kept).max(window).max(pad)..=query
    }

    /// Width of values.
    fn width(&self) -> usize {
        self.width.unwrap_or(self.head_dim)
    }

    /// The inputs. Numbers that no query sees are NaN where the format has one.
    fn inputs(&self, numbers: &mut Numbers) -> AttentionPacked {
        let Self { batch, kv_heads, group, new, slots, recent, head_dim, .. } = *self;
        let q = numbers.tensor([batch, kv_heads * group, new, head_dim], Plain);
        let of_keys = if self.latent { head_dim - self.width() } else { head_dim };
        let packing = |(bits, group, along)| Packing::new(bits, group, along).expect("it is possible");
        let (key_packing, value_packing) = (packing(self.keys), packing(self.values));
        let mut packed = |width, packing| numbers.packed([batch, kv_heads, slots, width], packing);
        let (keys, values) = (packed(of_keys, key_packing), packed(self.width(), value_packing));
        let end = Tensor::<1, Int>::from_data([self.end as i32], numbers.device());
        let packed = PackedKv { keys, values, key_packing, value_packing, origin: self.origin, end };

        let mut used = vec![vec![false; recent]; batch];
        for (row, used) in used.iter_mut().enumerate() {
            for position in (0..new).flat_map(|i| self.seen(row, i)).filter(|p| *p >= self.end) {
                used[Self::slot(position, self.recent_origin, recent)] = true;
            }
        }
        let mut buffer = |width| {
            let shape = [batch, kv_heads, recent, width];
            numbers.tensor_where(shape, Plain, |[row, _, slot, _]| used[row][slot])
        };
        let recent = DenseKv {
            keys: buffer(of_keys),
            values: buffer(self.width()),
            start: self.start,
            origin: self.recent_origin,
            shared: None,
        };
        let row = |row: usize| RowPosition {
            first: self.first + row * self.apart,
            base: 0,
            visible_from: self.pad.map_or(0, |pad| row * pad),
        };
        let positions = Positions::new((0..batch).map(row).collect(), numbers.device());
        let Self { softcap, window, causal, latent, .. } = *self;
        let shape = AttentionShape {
            scale: (head_dim as f64).powf(-0.5),
            softcap,
            window,
            causal,
            end: None,
            latent,
        };
        let sinks = self.sinks.then(|| numbers.float32([kv_heads * group]));
        AttentionPacked { q, packed, recent, positions, shape, sinks }
    }

    /// Allowed error of an element before it is rounded to its type. Numbers that are unpacked first are
    /// rounded to it, too.
    fn tolerance(&self, want: f64, Rounding { single, ulp, .. }: Rounding) -> f64 {
        let (n, keys) = (self.head_dim as f64, (self.slots + self.recent) as f64);
        // As for dense attention, except that scales and offsets are multiplied after the sums. The sums are
        // of numbers up to the largest code times the scale and the offset, which together are less than
        // three times the largest number.
        let score = 3.0 * LARGEST * LARGEST * ((n.sqrt() + 1.0) * single + ulp / 2.0)
            + self.softcap.map_or(0.0, |cap| 4.0 * cap * single);
        let weight = score + 16.0 * single;
        3.0 * LARGEST * (2.0 * weight + (keys.sqrt() + 8.0) * single + ulp) + want.abs() * ulp
    }
}
