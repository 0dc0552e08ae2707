//! Inputs for comparing the implementations of attention over dense buffers.

use burn::tensor::{Device, Tensor};
use kiln_core::{
    layer::{Positions, RowPosition},
    view::DenseKv,
};

use crate::{
    attention::{Attention, AttentionShape, append::AttentionAppend},
    cache::kv_append::KvAppend,
    runtime::{choice::Implementation, kernel::INVARIANT_UP_TO},
    testing::{
        case::{Case, LARGEST, Rounding},
        numbers::{Cut, Layout, Numbers, Plain, Swapped},
    },
};

pub(crate) fn cases() -> Vec<Case<Attention>> {
    let case = |given: Given| {
        let is_of_gpus = given.head_dim <= 256 && given.width() == given.head_dim;
        let lacks = move |path, _| given.new == 0 || (path != Implementation::Native && !is_of_gpus);
        // Matrix units take the weights of many queries in the type of the values: each is off by half an ulp
        // of itself, and they sum to 1. On wgpu, scores are exponents of 2, which adds two roundings; those
        // of the weights are up to 14, which adds 28.
        let weights = move |ulp, single| LARGEST * (ulp / 2.0 + 2.0 * (28.0 + 2.0 * given.score()) * single);
        let tolerance = move |want: f64, Rounding { ulp, single, .. }| {
            let of_units = if ulp > 0.0 && is_prompt(given.new) { weights(ulp, single) } else { 0.0 };
            given.tolerance() + of_units + want.abs() * ulp
        };
        let case = Case::new(given, move |numbers| given.inputs(numbers)).without(lacks).within(tolerance);
        if given.is_probed() { case.probed() } else { case }
    };
    all().into_iter().map(case).collect()
}

/// Cases of a token whose key and value are written first.
pub(crate) fn appending() -> Vec<Case<AttentionAppend>> {
    let case = |(given, new): (Given, Layout)| {
        let lacks = move |path, _| {
            let together = if 2 * given.head_dim <= 256 { 8 } else { 4 };
            let is_of_gpus = given.width() == given.head_dim && given.group <= together;
            let is_hidden = |row| given.visible_from(row) > given.first_of(row);
            path == Implementation::Native || !is_of_gpus || (0..given.batch).any(is_hidden)
        };
        let tolerance = move |want: f64, Rounding { ulp, .. }| given.tolerance() + want.abs() * ulp;
        let case = Case::new((given, new), move |numbers| given.appending(new, numbers));
        case.without(lacks).within(tolerance)
    };
    all_appending().into_iter().map(case).collect()
}

fn all_appending() -> Vec<(Given, Layout)> {
    let step = Given { filled: true, ..STEP };
    let mut cases = Vec::new();
    for head_dim in [1, 8, 12, 80, 96, 128, 256] {
        let batch = Given { batch: 3, group: 4, head_dim, pad: Some(3), apart: 7, slots: 100, ..step };
        cases.extend([(Given { head_dim, ..step }, Plain), (batch, Swapped(1, 2))]);
    }
    for group in [1, 4, 7, 8, 9] {
        cases.push((Given { group, softcap: Some(2.5), kv_heads: 3, ..step }, Swapped(1, 2)));
    }
    // The first token, the last slot, a ring that has wrapped, and one that wraps at the new token.
    cases.extend([0, 63].map(|first| (Given { first, ..step }, Plain)));
    for origin in [0, 7, 1000, 1001] {
        let late = Given { first: 1000, start: 960, slots: 50, origin, ..step };
        cases.extend([(late, Plain), (Given { window: Some(11), head_dim: 12, ..late }, Swapped(1, 2))]);
    }
    // Parts of workgroups that share the keys: the new one in the middle, and as the first and the last of a
    // part.
    for first in [255, 256, 1023, 1024, 2900] {
        cases.push((Given { first, slots: 3000, group: 4, ..step }, Swapped(1, 2)));
    }
    cases.push((Given { first: 2048, slots: 3000, window: Some(1100), head_dim: 80, ..step }, Plain));
    // Twice as many rows in a workgroup, also in a ring that has wrapped.
    let wide = Given { group: 7, first: 2900, slots: 3000, ..step };
    cases.extend([wide, Given { sinks: true, ..wide }].map(|given| (given, Swapped(1, 2))));
    cases.push((Given { group: 8, first: 5000, start: 2001, origin: 17, ..wide }, Plain));
    cases.push((Given { batch: 3, first: 500, apart: 900, slots: 2500, sinks: true, ..step }, Plain));
    // Rows that share the buffers, and padding that hides the new token of a row.
    for batch in [3, 16] {
        cases.push((Given { batch, apart: 19, slots: 400, shared: true, ..step }, Swapped(1, 2)));
    }
    cases.push((
        Given { batch: 3, group: 4, apart: 900, slots: 2100, first: 200, shared: true, ..step },
        Plain,
    ));
    cases.push((Given { batch: 2, pad: Some(41), ..step }, Plain));
    // Values of another width.
    cases.push((Given { head_dim: 24, width: Some(16), ..step }, Plain));
    for layout in [Swapped(1, 2), Swapped(2, 3), Cut(2), Cut(3)] {
        cases.push((Given { batch: 2, kv: layout, q: Swapped(1, 2), ..step }, Cut(3)));
    }
    cases
}

#[derive(Clone, Copy, Debug)]
struct Given {
    batch: usize,
    kv_heads: usize,
    /// Query heads per key head.
    group: usize,
    new: usize,
    slots: usize,
    head_dim: usize,
    /// Width of values, if it is not that of keys.
    width: Option<usize>,
    /// Whether each key is followed by its value.
    latent: bool,
    first: usize,
    start: usize,
    origin: usize,
    window: Option<usize>,
    softcap: Option<f64>,
    /// Factor by which scores exceed those of common models.
    sharpness: f64,
    /// Whether each head has a sink.
    sinks: bool,
    /// Row `b` is padded below `pad · b`.
    pad: Option<usize>,
    /// Row `b` starts `apart · b` positions after the first row.
    apart: usize,
    q: Layout,
    kv: Layout,
    /// Whether each query stands one position after the previous one, instead of all at `first`.
    causal: bool,
    /// Number of positions that queries stand after their place, as those do that see later keys.
    ahead: usize,
    /// Whether the rows share the buffers, with `slots` slots each.
    shared: bool,
    /// Whether slots that no query sees hold numbers, too.
    filled: bool,
    /// Positions at which the next buffer begins. All buffers except the last have a few extra slots that do
    /// not count.
    cuts: &'static [usize],
}

/// One query after 40 others.
const STEP: Given = Given {
    batch: 1,
    kv_heads: 2,
    group: 2,
    new: 1,
    slots: 64,
    head_dim: 64,
    width: None,
    latent: false,
    first: 40,
    start: 0,
    origin: 0,
    window: None,
    softcap: None,
    sharpness: 1.0,
    sinks: false,
    pad: None,
    apart: 0,
    q: Plain,
    kv: Plain,
    causal: true,
    ahead: 0,
    shared: false,
    filled: false,
    cuts: &[],
};

/// The queries of a prompt, in the layout that projections produce.
const PROMPT: Given = Given { new: 33, slots: 33, first: 0, q: Swapped(1, 2), kv: Swapped(1, 2), ..STEP };

/// Whether each workgroup goes over all keys. With few queries, several workgroups share the keys.
fn is_prompt(new: usize) -> bool {
    new > INVARIANT_UP_TO
}

/// A case with enough earlier positions that workgroups share them, or that they fill several blocks of keys.
fn long(new: usize) -> Given {
    let (slots, first) = if is_prompt(new) { (500, 450) } else { (3000, 2900) };
    Given { new, slots, first, group: 4, ..STEP }
}

fn all() -> Vec<Given> {
    let mut cases = Vec::new();
    for head_dim in [1, 8, 12, 80, 96, 128, 256] {
        for base in [STEP, PROMPT] {
            cases.push(Given { head_dim, ..base });
            cases.push(Given { head_dim, batch: 3, group: 4, pad: Some(3), softcap: Some(2.5), ..base });
        }
    }
    for base in [STEP, PROMPT, Given { new: 5, ..STEP }, long(1), long(33)] {
        let base = Given { batch: 2, kv_heads: 1, group: 4, latent: true, ..base };
        for (head_dim, width) in [(40, 24), (576, 512), (9, 8), (24, 12)] {
            cases.push(Given { head_dim, width: Some(width), pad: Some(3), ..base });
        }
        cases.push(Given { head_dim: 48, width: Some(32), softcap: Some(2.5), kv: Swapped(1, 2), ..base });
    }
    for group in [1, 2, 4, 7] {
        for new in [1, 2, 5, 33, 130] {
            let base = Given { batch: 2, group, new, slots: 150, first: 17, head_dim: 12, ..STEP };
            cases.push(base);
            // The ring wraps in the middle of the visible positions.
            cases.push(Given { origin: 100, softcap: Some(3.0), pad: Some(20), ..base });
            cases.push(Given { origin: 5, start: 9, window: Some(11), ..base });
        }
    }
    for base in [STEP, PROMPT, Given { new: 5, ..STEP }] {
        let end = base.first + base.new;
        // Rings with fewer slots than positions so far, and views that begin late.
        let slots = base.new + 10;
        let late = Given { first: 1000, slots, start: 1000 + base.new - slots, ..base };
        for origin in [0, 7, late.start, 990, 1000 + base.new] {
            cases.push(Given { origin, ..late });
            cases.push(Given { origin, window: Some(11), ..late });
        }
        // Positions that slots no longer hold are invisible, although nothing else hides them.
        cases.push(Given { start: 0, ..late });
        cases.push(Given { start: 1000, origin: 1000, ..late });
        // Padding that leaves the first queries without keys, and padding that leaves all of them without.
        for pad in [1, base.first + 1, end - 1, end] {
            cases.push(Given { batch: 2, pad: Some(pad), ..base });
        }
        for window in [1, 2, 16, 4096] {
            cases.push(Given { window: Some(window), ..base });
        }
        for layout in [Swapped(1, 2), Swapped(2, 3), Cut(0), Cut(2), Cut(3)] {
            cases.push(Given { batch: 2, q: layout, ..base });
            cases.push(Given { batch: 2, kv: layout, ..base });
        }
        cases.push(Given { softcap: Some(0.5), ..base });
        cases.push(Given { softcap: Some(50.0), ..base });
    }
    // Long enough to be split, in a buffer with room, and one that has wrapped.
    for new in [1, 5, 33] {
        let long = long(new);
        cases.push(long);
        cases.push(Given { kv_heads: 1, ..long });
        let start = 5000 - long.first;
        cases.push(Given { batch: 2, head_dim: 128, first: 5000, start, origin: 17, ..long });
        cases.push(Given { window: Some(300), head_dim: 8, ..long });
        cases.push(Given { first: 3, ..long });
    }
    // The largest number of queries that must not depend on each other, in the middle of blocks of keys and
    // across their ends.
    for new in [8, 16] {
        let base = Given { new, slots: 320, first: 250, group: 4, head_dim: 12, ..STEP };
        cases.push(base);
        cases.push(Given { window: Some(11), ..base });
        cases.push(Given { window: Some(300), softcap: Some(2.5), head_dim: 64, ..base });
        cases.push(Given { slots: 60, window: Some(40), start: 211, origin: 17, ..base });
        cases.push(Given { slots: 3000, first: 2043, group: 2, head_dim: 64, ..base });
        cases.push(Given { slots: 3000, first: 2043, window: Some(1100), head_dim: 80, ..base });
        cases.push(Given { slots: 1300, first: 2043, window: Some(1100), start: 944, origin: 5, ..base });
        cases.push(Given { batch: 16 / new, apart: 7, pad: Some(30), ..base });
        cases.push(Given { cuts: &[100, 255], ..base });
    }
    cases.push(Given { batch: 16, apart: 19, pad: Some(3), slots: 700, first: 200, ..STEP });
    // Rows of different lengths that share buffers.
    for (batch, new) in [(16, 1), (3, 1), (2, 5), (2, 33)] {
        let base = Given { batch, new, apart: 19, slots: 400, first: 40, shared: true, ..STEP };
        cases.push(base);
        cases.push(Given { group: 4, head_dim: 12, window: Some(30), pad: Some(3), ..base });
    }
    cases.push(Given { batch: 3, apart: 900, slots: 2100, first: 200, shared: true, ..STEP });
    cases.push(Given { new: 130, slots: 700, first: 500, group: 4, head_dim: 128, ..PROMPT });
    // Several buffers: cut in the middle of the visible positions, before and after them, and with more
    // positions than a workgroup takes.
    for new in [1, 2, 33] {
        let base = Given { new, slots: 130, first: 90, ..STEP };
        for cuts in [&[1][..], &[50], &[64, 65, 89], &[30, 90]] {
            cases.push(Given { cuts, ..base });
            cases.push(Given { cuts, batch: 2, group: 4, pad: Some(40), head_dim: 12, ..base });
            cases.push(Given { cuts, softcap: Some(2.5), kv: Swapped(1, 2), head_dim: 80, ..base });
            // Some of the buffers are out of sight.
            cases.push(Given { cuts, window: Some(20), start: 9, ..base });
        }
        let long = long(new);
        let [two, three]: [&[usize]; 2] = match is_prompt(new) {
            true => [&[70, 300], &[70, 300, 449]],
            false => [&[300, 2200], &[300, 2200, 2899]],
        };
        cases.push(Given { cuts: two, ..long });
        cases.push(Given { cuts: three, batch: 2, head_dim: 128, window: Some(long.slots / 3), ..long });
        // As many buffers as there are parts that can be combined: one part each.
        cases.push(Given { cuts: &[10, 20, 30, 40, 50, 60, 70, 80], ..base });
    }
    // Rows of different lengths: with room, in a ring that has wrapped, split, padded, and in several
    // buffers.
    for new in [1, 3, 33] {
        let base = Given { batch: 3, new, apart: 7, slots: 150, first: 17, group: 4, ..STEP };
        cases.push(base);
        cases.push(Given { apart: 40, head_dim: 12, window: Some(11), ..base });
        cases.push(Given { first: 0, apart: 50, pad: Some(20), softcap: Some(2.5), ..base });
        cases.push(Given { first: 900, start: 800, origin: 40, ..base });
        cases.push(Given { cuts: &[10, 30], kv: Swapped(1, 2), ..base });
        let long = long(new);
        cases.push(Given { first: long.first / 3, apart: long.first / 3, head_dim: 128, batch: 3, ..long });
    }
    // Every query sees everything: with as many keys as slots, with fewer, and in several buffers.
    for new in [1, 3, 16, 33, 130] {
        let base = Given { new, slots: 150, first: 149, causal: false, ..STEP };
        cases.push(base);
        cases.push(Given { batch: 2, group: 1, kv_heads: 6, q: Swapped(1, 2), kv: Swapped(1, 2), ..base });
        cases.push(Given { slots: 20, first: 19, group: 4, head_dim: 12, softcap: Some(2.5), ..base });
        cases.push(Given { first: 90, batch: 3, pad: Some(11), ..base });
        cases.push(Given { slots: 1500, first: 1499, group: 1, ..base });
        cases.push(Given { cuts: &[50], ..base });
    }
    // Each query sees keys before and after its place.
    for (new, ahead) in [(2, 1), (16, 5), (33, 8), (130, 40), (300, 256)] {
        let base = Given { new, slots: new, ahead, window: Some(2 * ahead + 1), ..PROMPT };
        cases.push(base);
        cases.push(Given { batch: 3, group: 4, head_dim: 12, softcap: Some(2.5), ..base });
        cases.push(Given { head_dim: 256, kv_heads: 1, group: 3, ..base });
    }
    // Scores far apart: the running maximum is exceeded by far again and again, which scales earlier sums to
    // almost nothing.
    for new in [1, 5, 33, 65] {
        for head_dim in [64, 80, 96, 128] {
            // An odd number of cases, because tests of float16 take every second one.
            let base = Given { new, head_dim, slots: 300, first: 200, sharpness: 8.0, ..STEP };
            cases.push(base);
            cases.push(Given { batch: 2, group: 4, pad: Some(150), softcap: Some(30.0), ..base });
            cases.push(Given { window: Some(90), kv: Swapped(1, 2), q: Swapped(1, 2), ..base });
        }
    }
    // Other multiples of 16, which take few lanes, or some for a part of what they load.
    for (new, head_dim) in [(33, 16), (130, 32), (65, 48), (65, 112)] {
        let base = Given { batch: 2, new, head_dim, slots: 300, first: 150, ..STEP };
        cases.push(Given { group: 4, pad: Some(70), sharpness: 8.0, window: Some(120), ..base });
    }
    // Values of another width.
    for (head_dim, width) in [(24, 16), (192, 128), (40, 8), (12, 30), (64, 300)] {
        for new in [1, 5, 16, 33, 130] {
            let base = Given { new, head_dim, width: Some(width), slots: 300, first: 150, ..STEP };
            cases.push(base);
            cases.push(Given { batch: 3, group: 4, apart: 7, pad: Some(60), softcap: Some(2.5), ..base });
            cases.push(Given { window: Some(90), kv: Swapped(1, 2), q: Swapped(1, 2), origin: 17, ..base });
        }
        let base = Given { head_dim, width: Some(width), ..STEP };
        cases.push(Given { cuts: &[20], ..base });
        cases.push(Given { batch: 3, apart: 19, slots: 400, shared: true, ..base });
        cases.push(Given { new: 3, slots: 150, first: 149, causal: false, kv: Cut(3), ..base });
        cases.push(Given { head_dim, width: Some(width), kv_heads: 1, ..long(1) });
    }
    cases.push(Given { cuts: &[20], head_dim: 300, ..STEP });
    for new in [1, 5, 16, 33, 130] {
        let base = Given { new, slots: 300, first: 150, group: 4, sinks: true, ..STEP };
        cases.push(base);
        let padded = Given { batch: 3, apart: 7, pad: Some(80), softcap: Some(2.5), ..base };
        cases.push(Given { window: Some(11), head_dim: 12, ..padded });
        cases.push(Given { kv_heads: 1, cuts: &[50], q: Swapped(1, 2), kv: Swapped(1, 2), ..base });
        cases.push(Given { batch: 2, head_dim: 128, sinks: true, ..long(new) });
    }
    cases.push(Given { batch: 3, apart: 19, slots: 400, shared: true, sinks: true, ..STEP });
    cases.push(Given { head_dim: 24, width: Some(16), sinks: true, ..STEP });
    // Vectors longer than GPU kernels have memory for, and no queries.
    cases.push(Given { head_dim: 300, ..STEP });
    cases.push(Given { new: 0, ..STEP });
    cases
}

impl Given {
    /// Whether the case is in the probe: prompts in pieces, and one with scores far apart, with vectors of a
    /// length that matrix units take.
    fn is_probed(&self) -> bool {
        let is_sharp = self.sharpness > 1.0 && self.new == 65;
        is_prompt(self.new) && self.head_dim == 128 && (is_sharp || self.slots == 700)
    }

    fn positions(&self, device: &Device) -> Positions {
        let row = |row| RowPosition {
            first: self.first_of(row),
            visible_from: self.visible_from(row),
            // The last row comes first in the buffer.
            base: if self.shared { (self.batch - 1 - row) * self.slots } else { 0 },
        };
        Positions::new((0..self.batch).map(row).collect(), device)
    }

    /// The position of the first query of `row`.
    fn first_of(&self, row: usize) -> usize {
        self.first + self.ahead + row * self.apart
    }

    /// The first position without a key, if queries stand there.
    fn end(&self) -> Option<usize> {
        (self.ahead > 0).then_some(self.slots)
    }

    fn visible_from(&self, row: usize) -> usize {
        self.pad.map_or(0, |pad| row * pad)
    }

    /// The positions that query `i` of `row` sees.
    fn seen(&self, row: usize, i: usize) -> std::ops::RangeInclusive<usize> {
        let query = self.first_of(row) + if self.causal { i } else { 0 };
        let behind = if self.causal { self.new } else { 1 };
        let end = self.end().unwrap_or(usize::MAX);
        let kept = (self.first_of(row) + behind).min(end).saturating_sub(self.slots);
        let window = self.window.map_or(0, |window| (query + 1).saturating_sub(window));
        self.start.max(kept).max(window).max(self.visible_from(row))..=query.min(end - 1)
    }

    fn slot(&self, position: usize) -> usize {
        (position as i64 - self.origin as i64).rem_euclid(self.slots as i64) as usize
    }

    /// Queries, keys and values. Slots that no query sees are NaN, unless they are filled.
    fn tensors(&self, numbers: &mut Numbers) -> [Tensor<4>; 3] {
        let Self { batch, kv_heads, group, new, slots, head_dim, .. } = *self;
        let mut used = vec![vec![self.filled; slots]; batch];
        for (row, used) in used.iter_mut().enumerate() {
            for position in (0..new).flat_map(|i| self.seen(row, i)) {
                used[self.slot(position)] = true;
            }
        }
        let queries = numbers.tensor([batch, kv_heads * group, new, head_dim], self.q);
        let mut buffer = |width| match self.shared {
            true => {
                let shape = [1, kv_heads, batch * slots, width];
                let used = |[_, _, slot, _]: [usize; 4]| used[batch - 1 - slot / slots][slot % slots];
                let all = numbers.tensor_where(shape, self.kv, used);
                all.expand([batch, kv_heads, batch * slots, width])
            }
            false => {
                let shape = [batch, kv_heads, slots, width];
                numbers.tensor_where(shape, self.kv, |[row, _, slot, _]| used[row][slot])
            }
        };
        let of_keys = if self.latent { head_dim - self.width() } else { head_dim };
        [queries, buffer(of_keys), buffer(self.width())]
    }

    /// Width of values.
    fn width(&self) -> usize {
        self.width.unwrap_or(self.head_dim)
    }

    fn shape(&self) -> AttentionShape {
        let Self { head_dim, softcap, sharpness, window, causal, latent, .. } = *self;
        let scale = sharpness * (head_dim as f64).powf(-0.5);
        AttentionShape { scale, softcap, window, causal, end: self.end(), latent }
    }

    fn inputs(&self, numbers: &mut Numbers) -> Attention {
        let [q, keys, values] = self.tensors(numbers);
        let (positions, shape) = (self.positions(numbers.device()), self.shape());
        if self.cuts.is_empty() {
            let shared = self.shared.then_some(self.slots);
            let kv = DenseKv { keys, values, start: self.start, origin: self.origin, shared };
            return Attention { q, chain: vec![kv], positions, shape, sinks: self.numbers_of_sinks(numbers) };
        }
        let begins = [0].into_iter().chain(self.cuts.iter().copied());
        let ends = self.cuts.iter().map(|cut| cut + 3).chain([self.slots]);
        let chain = begins.zip(ends).map(|(begin, end)| {
            let [keys, values] =
                [&keys, &values].map(|kv| kv.clone().narrow(2, begin, end.min(self.slots) - begin));
            DenseKv { keys, values, start: self.start, origin: begin, shared: None }
        });
        let sinks = self.numbers_of_sinks(numbers);
        Attention { q, chain: chain.collect(), positions, shape, sinks }
    }

    fn appending(&self, new: Layout, numbers: &mut Numbers) -> AttentionAppend {
        let [q, keys, values] = self.tensors(numbers);
        let Self { batch, kv_heads, head_dim, start, origin, slots, .. } = *self;
        let positions = self.positions(numbers.device());
        // Rows that share buffers were expanded. A sum is a tensor of its own, which is written in place.
        let buffers = [keys, values].map(|kv| if self.shared { kv.narrow(0, 0, 1) + 0.0 } else { kv });
        let mut token = |width| numbers.tensor([batch, kv_heads, 1, width], new);
        let append = KvAppend { buffers, new: [token(head_dim), token(self.width())], positions, origin };
        let shared = self.shared.then_some(slots);
        AttentionAppend {
            q,
            append,
            start,
            shared,
            shape: self.shape(),
            sinks: self.numbers_of_sinks(numbers),
        }
    }

    fn numbers_of_sinks(&self, numbers: &mut Numbers) -> Option<Tensor<1>> {
        self.sinks.then(|| numbers.float32([self.kv_heads * self.group]))
    }

    /// The largest score.
    fn score(&self) -> f64 {
        LARGEST * LARGEST * (self.head_dim as f64).sqrt() * self.sharpness
    }

    /// Allowed error of an element before it is rounded to its type.
    fn tolerance(&self) -> f64 {
        let single = f64::from(f32::EPSILON);
        let (n, keys) = (self.head_dim as f64, self.slots as f64);
        // A sum of n products in another order, as in `linear`, scaled by n^-1/2 and the sharpness; a
        // hyperbolic tangent, which GPUs compute from exponentials, of up to the cap.
        let score = self.score() * (1.0 + n.sqrt().recip()) * single
            + self.softcap.map_or(0.0, |cap| 4.0 * cap * single);
        // WGSL allows an error of 3 + 2 |x| roundings in exp(x). For scores of a few units, this is at most 3
        // for the largest weight and no more than this for their sum. With scores far apart, light weights
        // have larger errors, which count less.
        let weight = score + 16.0 * single;
        // The value inherits the error of all weights, above and below the fraction bar, and that of a sum in
        // another order.
        LARGEST * (2.0 * weight + (keys.sqrt() + 8.0) * single)
    }
}
