//! Laws that every layer memory must obey, stated once. No strategy is named here.
#![allow(clippy::unwrap_used, reason = "a law that does not hold panics")]

mod feeding;
mod rows;
mod state;

use std::ops::Range;

use burn::tensor::{Device, Tensor, TensorData};
use kiln::{
    Error,
    expert::{
        ModelCache,
        kernels::{Kernels, KvAppend},
        memory::{
            AttentionNeed, CrossLayer, DenseKv, KvLayer, KvSpan, KvView, LayerCache, LayerState, Parents,
            Positions, Reorders, Stream,
        },
    },
};

pub use rows::rows_conform;
pub use state::{state_conforms, state_needs};

use feeding::{feed, floats, in_order, keys, push, tokens_of, update, values_of};

/// The subject of the laws: a builder of layers, and the properties of their strategy.
pub struct Subject<'a> {
    pub name: String,
    pub device: &'a Device,
    pub build: &'a dyn Fn() -> Box<dyn KvLayer>,
    /// Whether the layer retains what it is given.
    pub remembers: bool,
    /// Whether attention reads every key that the model may see.
    pub exact: bool,
    /// Largest difference between a returned number and the stored one.
    pub loss: f32,
    pub need: &'a AttentionNeed,
    pub kernels: &'a Kernels,
}

impl std::fmt::Debug for Subject<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.name)
    }
}

/// Needs of blocks for which the laws must hold besides those of keys and values alike: values narrower than
/// keys; a latent and a narrow one beside it, as in latent attention; and other numbers of heads.
pub fn attention_needs() -> Vec<AttentionNeed> {
    let stream = |heads, width| Stream { heads, width };
    [(stream(2, 24), stream(2, 16)), (stream(1, 40), stream(1, 8)), (stream(1, 32), stream(3, 8))]
        .map(|(keys, values)| AttentionNeed { keys, values, window: None, rotary: None })
        .into()
}

/// Checks every law that applies to `subject`.
pub fn conforms(subject: &Subject<'_>) {
    view_is_what_span_promised(subject);
    a_refused_truncation_changes_nothing(subject);
    questions_are_answered_from_host_memory(subject);
    offloading_changes_nothing(subject);
    what_is_empty_can_be_offloaded(subject);
    a_restored_layer_goes_on(subject);
    reset_is_new(subject);
    if subject.remembers {
        let by_pass = (subject.build)().limits().by_pass;
        assert_eq!(by_pass, !subject.exact, "{subject:?}: what a query sees depends on passes");
        chunks_equal_one_pass(subject);
        what_was_truncated_was_never_seen(subject);
        a_truncation_is_exact(subject);
        a_late_promise_is_exact(subject);
        other_first_tokens_are_those_that_count(subject);
        what_forgot_everything_is_new(subject);
        futures_of_a_snapshot_do_not_meet(subject);
        what_was_lent_is_the_same(subject);
        what_is_written_by_others_is_the_same(subject);
        rows_can_be_reordered(subject);
        rows_can_be_reordered_on_the_device(subject);
        a_row_that_is_not_there_is_refused(subject);
        another_batch_is_refused(subject);
        if subject.exact {
            view_ends_with_the_latest_tokens(subject);
            branches_of_a_tree_do_not_meet(subject);
        }
    }
}

fn view_is_what_span_promised(subject: &Subject<'_>) {
    let mut layer = (subject.build)();
    let mut next = 0;
    assert!(layer.gather().unwrap().is_none(), "{subject:?} holds nothing yet");
    for n in [1, 3, 1, 7, 2, 1, 1, 90, 1] {
        // `push` compares the view with its span.
        let got = push(subject, &mut *layer, next..next + n);
        next += n;
        let held = layer.span(0);
        match layer.gather().unwrap() {
            None => assert!(!subject.remembers || held.len == 0, "{subject:?} at {next}"),
            Some((keys, values)) => {
                assert_eq!(keys.dims()[2], held.len, "{subject:?} at {next}");
                let held = tokens_of(subject, keys, values);
                assert!(got.ends_with(&held), "{subject:?} at {next}: {held:?} of {got:?}");
            }
        }
        assert_eq!(got.last(), Some(&(next as f32 - 1.0)), "{subject:?} at {next}");
        assert_eq!(layer.seq_len(), if subject.remembers { next } else { 0 }, "{subject:?} at {next}");
    }
}

fn view_ends_with_the_latest_tokens(subject: &Subject<'_>) {
    let mut layer = (subject.build)();
    let mut next = 0;
    for n in [1, 3, 1, 7, 2, 1, 1, 90, 1] {
        let span = layer.span(n);
        assert_eq!(span.query(n), next, "{subject:?} counts absolute positions");
        let needed = subject.need.window.map_or(0, |window| (next + 1).saturating_sub(window));
        assert!(
            span.start <= needed,
            "{subject:?}: the first query at {next} sees from {needed}, not {span:?}"
        );
        let want: Vec<f32> = (span.start..next + n).map(|t| t as f32).collect();
        assert_eq!(push(subject, &mut *layer, next..next + n), want, "{subject:?} at {next}");
        next += n;
    }
}

fn futures_of_a_snapshot_do_not_meet(subject: &Subject<'_>) {
    let (mut one, mut alone, mut other) = ((subject.build)(), (subject.build)(), (subject.build)());
    for layer in [&mut one, &mut alone, &mut other] {
        push(subject, &mut **layer, 0..9);
    }
    let mut snapshot = one.snapshot();
    for t in 9..15 {
        let want = push(subject, &mut *alone, t..t + 1);
        assert_eq!(push(subject, &mut *one, t..t + 1), want, "{subject:?}");
        let want = push(subject, &mut *other, t + 50..t + 51);
        assert_eq!(push(subject, &mut *snapshot, t + 50..t + 51), want, "{subject:?}");
    }
}

/// Snapshots of snapshots are independent, with enough tokens that strategies may share them instead of
/// copying.
fn branches_of_a_tree_do_not_meet(subject: &Subject<'_>) {
    let mut trunk = Branch { layer: (subject.build)(), fed: Vec::new() };
    let long = if trunk.layer.limits().capacity.is_some() { 30 } else { 300 };
    trunk.feed(subject, 0..long);
    let mut twigs = Vec::new();
    for n in 1..6 {
        let mut twig = Branch { layer: trunk.layer.snapshot(), fed: trunk.fed.clone() };
        let end = long * n;
        twig.feed(subject, end + 3..end + 4);
        trunk.feed(subject, end..end + 1);
        trunk.feed(subject, end + 1..end + long);
        twigs.push(twig);
    }
    for (n, twig) in twigs.iter_mut().enumerate() {
        twig.feed(subject, 7..9 + n);
        // Once within the tokens fed to this branch alone, and once into the shared ones.
        for back in [n + 2, 40] {
            let len = twig.fed.len() - back;
            if twig.layer.rewind_point(len) == len {
                twig.layer.truncate(len).unwrap();
                twig.fed.truncate(len);
                twig.feed(subject, 20..23);
            }
        }
    }
    // Moved to the host, reordered by row, saved: each on a branch that shares, while the others exist.
    let [away, rows, saved, ..] = &mut twigs[..] else { unreachable!("there are five") };
    away.layer.offload().unwrap();
    rows.layer.reorder(&[0]).unwrap();
    let state = saved.layer.save().unwrap();
    let mut restored = Branch { layer: (subject.build)(), fed: saved.fed.clone() };
    restored.layer.restore(state).unwrap();
    for branch in twigs.iter_mut().chain([&mut restored, &mut trunk]) {
        branch.feed(subject, 30..31);
        branch.feed(subject, 31..33);
        let held = branch.layer.gather().unwrap().map_or(0, |(keys, _)| keys.dims()[2]);
        assert_eq!(held, branch.layer.span(0).len, "{subject:?}");
    }
    trunk.layer.reset();
    trunk.fed.clear();
    trunk.feed(subject, 0..3);
    twigs[0].feed(subject, 33..34);
}

/// A layer of an exact strategy, and the tokens that it was fed.
struct Branch {
    layer: Box<dyn KvLayer>,
    fed: Vec<usize>,
}

impl Branch {
    fn feed(&mut self, subject: &Subject<'_>, tokens: Range<usize>) {
        self.fed.extend(tokens.clone());
        let span = self.layer.span(tokens.len());
        assert_eq!(span.start + span.len, self.fed.len(), "{subject:?}");
        let want: Vec<f32> = self.fed[span.start..].iter().map(|&t| t as f32).collect();
        assert_eq!(push(subject, &mut *self.layer, tokens), want, "{subject:?}");
    }
}

fn chunks_equal_one_pass(subject: &Subject<'_>) {
    let (mut once, mut chunked) = ((subject.build)(), (subject.build)());
    push(subject, &mut *once, 0..12);
    for chunk in [0..5, 5..6, 6..12] {
        push(subject, &mut *chunked, chunk);
    }
    let want = push(subject, &mut *once, 12..13);
    assert_eq!(push(subject, &mut *chunked, 12..13), want, "{subject:?}");
}

fn what_was_truncated_was_never_seen(subject: &Subject<'_>) {
    for n in 0..4 {
        let (mut straight, mut detour) = ((subject.build)(), (subject.build)());
        detour.keep_history(4);
        push(subject, &mut *straight, 0..9);
        push(subject, &mut *detour, 0..9);
        push(subject, &mut *detour, 100..100 + n);
        assert_eq!(detour.rewind_point(9), 9, "{subject:?} kept history");
        detour.truncate(9).unwrap();
        assert_eq!(detour.seq_len(), straight.seq_len());
        let want = push(subject, &mut *straight, 9..11);
        assert_eq!(push(subject, &mut *detour, 9..11), want, "{subject:?} after {n}");
    }
}

fn a_truncation_is_exact(subject: &Subject<'_>) {
    for len in [0, 1, 4, 7] {
        for n in 0..=len {
            let (mut straight, mut detour) = ((subject.build)(), (subject.build)());
            (0..len).for_each(|t| _ = push(subject, &mut *detour, t..t + 1));
            if detour.rewind_point(len - n) != len - n {
                continue;
            }
            (0..len - n).for_each(|t| _ = push(subject, &mut *straight, t..t + 1));
            detour.truncate(len - n).unwrap();
            let want = push(subject, &mut *straight, 70..72);
            assert_eq!(push(subject, &mut *detour, 70..72), want, "{subject:?} {len}-{n}");
        }
    }
}

/// Tokens that are kept permanently, such as sinks, may be replaced after a truncation.
fn other_first_tokens_are_those_that_count(subject: &Subject<'_>) {
    let (mut straight, mut detour) = ((subject.build)(), (subject.build)());
    detour.keep_history(8);
    straight.keep_history(8);
    (0..9).for_each(|t| _ = push(subject, &mut *detour, t..t + 1));
    if detour.rewind_point(1) != 1 {
        return;
    }
    detour.truncate(1).unwrap();
    push(subject, &mut *straight, 0..1);
    for t in 50..64 {
        let want = push(subject, &mut *straight, t..t + 1);
        assert_eq!(push(subject, &mut *detour, t..t + 1), want, "{subject:?} at {t}");
    }
}

/// A longer history is promised while buffers are in use.
fn a_late_promise_is_exact(subject: &Subject<'_>) {
    for n in [1, 4, 5, 9, 13] {
        let (mut straight, mut detour) = ((subject.build)(), (subject.build)());
        for t in 0..30 {
            if t == 25 {
                detour.keep_history(5);
            }
            push(subject, &mut *detour, t..t + 1);
        }
        let reached = detour.rewind_point(30 - n);
        assert!(n > 5 || reached == 30 - n, "{subject:?} kept history");
        if reached != 30 - n {
            continue;
        }
        (0..30 - n).for_each(|t| _ = push(subject, &mut *straight, t..t + 1));
        detour.truncate(30 - n).unwrap();
        for t in 70..80 {
            let want = push(subject, &mut *straight, t..t + 1);
            assert_eq!(push(subject, &mut *detour, t..t + 1), want, "{subject:?} after {n}");
        }
    }
}

fn a_refused_truncation_changes_nothing(subject: &Subject<'_>) {
    let mut layer = (subject.build)();
    push(subject, &mut *layer, 0..20);
    for len in (1..20).rev() {
        let (before, point) = (layer.span(1), layer.rewind_point(len));
        assert!(point <= len, "{subject:?} {len}");
        if point != len && subject.remembers {
            assert!(matches!(layer.truncate(len), Err(Error::CannotTruncate { .. })), "{subject:?} {len}");
            assert_eq!(layer.span(1), before, "{subject:?} {len}");
        }
    }
    layer.truncate(20).unwrap();
    layer.truncate(21).unwrap();
    assert_eq!(layer.seq_len(), if subject.remembers { 20 } else { 0 }, "{subject:?} has nothing to forget");
}

fn questions_are_answered_from_host_memory(subject: &Subject<'_>) {
    let mut layer = (subject.build)();
    layer.keep_history(4);
    push(subject, &mut *layer, 0..10);
    push(subject, &mut *layer, 10..12);
    let ask = |layer: &dyn KvLayer| {
        (layer.seq_len(), layer.rows(), layer.span(3), [0, 7, 10, 11, 12].map(|len| layer.rewind_point(len)))
    };
    let before = ask(&*layer);
    layer.offload().unwrap();
    assert_eq!(ask(&*layer), before, "{subject:?} in host memory");
    layer.prefetch().unwrap();
    assert_eq!(ask(&*layer), before, "{subject:?} on the device again");
}

fn offloading_changes_nothing(subject: &Subject<'_>) {
    let (mut stayed, mut moved) = ((subject.build)(), (subject.build)());
    push(subject, &mut *stayed, 0..10);
    push(subject, &mut *moved, 0..10);
    moved.offload().unwrap();
    let usage = moved.usage();
    assert_eq!((usage.device, moved.is_offloaded()), (0, true), "{subject:?} left nothing behind");
    for t in 10..30 {
        let want = push(subject, &mut *stayed, t..t + 1);
        assert_eq!(push(subject, &mut *moved, t..t + 1), want, "{subject:?}");
    }
}

fn what_is_empty_can_be_offloaded(subject: &Subject<'_>) {
    let mut layer = (subject.build)();
    layer.keep_history(3);
    push(subject, &mut *layer, 0..3);
    layer.truncate(0).unwrap();
    layer.offload().unwrap();
    assert_eq!(push(subject, &mut *layer, 5..7), [5.0, 6.0], "{subject:?}");
}

fn what_forgot_everything_is_new(subject: &Subject<'_>) {
    let (mut new, mut used) = ((subject.build)(), (subject.build)());
    (0..30).for_each(|t| _ = push(subject, &mut *used, t..t + 1));
    used.truncate(0).unwrap();
    assert!(used.gather().unwrap().is_none(), "{subject:?} holds nothing any more");
    for t in 50..62 {
        let want = push(subject, &mut *new, t..t + 1);
        assert_eq!(push(subject, &mut *used, t..t + 1), want, "{subject:?}");
        let before = new.seq_len() - 1;
        assert_eq!(used.rewind_point(before), new.rewind_point(before), "{subject:?}");
        assert_eq!(used.gather().unwrap().is_some(), used.span(0).len > 0, "{subject:?}");
    }
    let state = used.save().unwrap();
    let mut restored = (subject.build)();
    restored.restore(state).unwrap();
    assert_eq!(restored.span(2), new.span(2), "{subject:?}");
}

/// Keys are lent to a buffer of several rows, in which a token is stored, and taken back.
fn what_was_lent_is_the_same(subject: &Subject<'_>) {
    let (mut layer, mut alone) = ((subject.build)(), (subject.build)());
    assert!(layer.lend().unwrap().is_none(), "{subject:?} has nothing to lend");
    for layer in [&mut layer, &mut alone] {
        push(subject, &mut **layer, 0..9);
    }
    let Some(slots) = layer.slots_for(3) else { return };
    assert!(slots >= 12, "{subject:?} has room for 12 tokens in {slots} slots");
    let (k, v) = layer.lend().unwrap().unwrap();
    assert_eq!((layer.seq_len(), layer.rows(), layer.usage().device), (9, Some(1), 0), "{subject:?}");
    let copy = |tensor: Tensor<4>, new: Tensor<4>| {
        let [_, heads, _, width] = tensor.dims();
        let room = Tensor::zeros([1, heads, slots - 10, width], subject.device);
        Tensor::cat(vec![tensor.narrow(2, 0, 9), new, room], 2)
    };
    let new = keys(subject, 9..10);
    let kv = (copy(k, new.clone()), copy(v, values_of(subject, new)));
    layer.stored(1);
    push(subject, &mut *alone, 9..10);
    assert_eq!((layer.seq_len(), layer.span(1)), (10, alone.span(1)), "{subject:?}");
    layer.take_back(kv);
    let want = push(subject, &mut *alone, 10..14);
    assert_eq!(push(subject, &mut *layer, 10..14), want, "{subject:?}");
}

/// Tokens that are written into a lent buffer are those of updates, and snapshots keep what they had.
fn what_is_written_by_others_is_the_same(subject: &Subject<'_>) {
    const FIRST: usize = 58;
    let (mut lending, mut alone) = ((subject.build)(), (subject.build)());
    for layer in [&mut lending, &mut alone] {
        push(subject, &mut **layer, 0..FIRST);
    }
    let mut copies = Vec::new();
    // Buffers of 64 slots are full in between.
    for t in FIRST..FIRST + 9 {
        let want = push(subject, &mut *alone, t..t + 1);
        let (new, span) = (keys(subject, t..t + 1), lending.span(1));
        let positions = |rows| Positions::all_at(span.query(1), rows, subject.device);
        if lending.rows() == Some(1) {
            let two_rows = Tensor::cat(vec![new.clone(), new.clone()], 0);
            assert!(lending.lend_to_write(&two_rows, &positions(2)).unwrap().is_none(), "{subject:?} at {t}");
        }
        let got = match lending.lend_to_write(&new, &positions(1)).unwrap() {
            None => push(subject, &mut *lending, t..t + 1),
            Some(DenseKv { keys, values, start, origin, shared }) => {
                let new = [new.clone(), values_of(subject, new)];
                let append = KvAppend { buffers: [keys, values], new, positions: positions(1), origin };
                let [keys, values] = subject.kernels.run(append);
                lending.take_back((keys.clone(), values.clone()));
                lending.stored(1);
                let view = KvView::Dense(DenseKv { keys, values, start, origin, shared });
                let (keys, values) = in_order(subject, view, span);
                tokens_of(subject, keys, values)
            }
        };
        assert_eq!(got, want, "{subject:?} at {t}");
        assert_eq!((lending.seq_len(), lending.span(1)), (alone.seq_len(), alone.span(1)), "{subject:?}");
        if t % 4 == 0 {
            copies.push((lending.snapshot(), alone.snapshot()));
        }
    }
    for (mut copy, mut want) in copies {
        let t = copy.seq_len();
        let want = push(subject, &mut *want, t..t + 1);
        assert_eq!(push(subject, &mut *copy, t..t + 1), want, "{subject:?}: a snapshot of {t} tokens");
    }
}

fn rows_can_be_reordered(subject: &Subject<'_>) {
    let mut layer = (subject.build)();
    let rows = |firsts: &[usize], n| {
        Tensor::cat(firsts.iter().map(|&first| keys(subject, first..first + n)).collect(), 0)
    };
    for start in [0, 100] {
        feed(subject, &mut *layer, rows(&[start, start + 6], 6));
    }
    layer.reorder(&[1, 0, 1]).unwrap();
    let (keys, values) = feed(subject, &mut *layer, rows(&[90, 91, 92], 1));
    let row = |b| tokens_of(subject, keys.clone().narrow(0, b, 1), values.clone().narrow(0, b, 1));
    for (b, want) in [[111.0, 90.0], [105.0, 91.0], [111.0, 92.0]].into_iter().enumerate() {
        let got = row(b);
        // A window of one token sees only itself.
        let seen = got.len().min(2);
        assert_eq!(got[got.len() - seen..], want[2 - seen..], "{subject:?}");
    }
}

/// Rows are reordered by indices on the device, if the layer supports it: rows of two prompts with different
/// continuations.
fn rows_can_be_reordered_on_the_device(subject: &Subject<'_>) {
    let mut layers = [(); 2].map(|()| (subject.build)());
    if layers[0].reorders() == Reorders::No {
        return;
    }
    let rows = |firsts: &[usize], n| {
        Tensor::cat(firsts.iter().map(|&first| keys(subject, first..first + n)).collect(), 0)
    };
    for layer in &mut layers {
        feed(subject, &mut **layer, rows(&[0, 0, 50, 50], 6));
        feed(subject, &mut **layer, rows(&[100, 110, 120, 130], 5));
    }
    let [on_host, on_device] = &mut layers;
    on_host.reorder(&[1, 1, 3, 2]).unwrap();
    let ints = |ints: &[i32]| Tensor::from_data(TensorData::from(ints), subject.device);
    let latest = on_device.span(0).query(1);
    let parents = Parents {
        rows: ints(&[1, 1, 1, 0]),
        firsts: ints(&[0, 0, 2, 2]),
        width: 2,
        positions: Positions::all_at(latest, 4, subject.device),
        behind: ints(&[5]),
    };
    on_device.reorder_on_device(&parents).unwrap();
    let [want, got] = layers.map(|mut layer| feed(subject, &mut *layer, rows(&[90, 91, 92, 93], 1)));
    assert_eq!(floats(got.0), floats(want.0), "{subject:?}");
    assert_eq!(floats(got.1), floats(want.1), "{subject:?}");
}

fn another_batch_is_refused(subject: &Subject<'_>) {
    let (mut layer, mut never) = ((subject.build)(), (subject.build)());
    push(subject, &mut *layer, 0..3);
    push(subject, &mut *never, 0..3);
    let two = Tensor::cat(vec![keys(subject, 3..4); 2], 0);
    let refused = update(subject, &mut *layer, two).map(|_| ());
    assert_eq!(refused, Err(Error::WrongRows { rows: 1, given: 2 }), "{subject:?}");
    let want = push(subject, &mut *never, 3..4);
    assert_eq!(push(subject, &mut *layer, 3..4), want, "{subject:?}");
}

fn a_row_that_is_not_there_is_refused(subject: &Subject<'_>) {
    let (mut asked, mut never) = ((subject.build)(), (subject.build)());
    push(subject, &mut *asked, 0..3);
    push(subject, &mut *never, 0..3);
    assert_eq!(asked.reorder(&[0, 1]), Err(Error::NoSuchRow { row: 1, rows: 1 }), "{subject:?}");
    let want = push(subject, &mut *never, 3..4);
    assert_eq!(push(subject, &mut *asked, 3..4), want, "{subject:?}");
}

fn a_restored_layer_goes_on(subject: &Subject<'_>) {
    for len in [0, 3, 10, 40] {
        let (mut saved, mut never) = ((subject.build)(), (subject.build)());
        push(subject, &mut *saved, 0..len);
        push(subject, &mut *never, 0..len);
        let state = saved.save().unwrap();
        let mut restored = (subject.build)();
        restored.restore(state.clone()).unwrap();
        assert_eq!((restored.seq_len(), restored.span(2)), (never.seq_len(), never.span(2)), "{subject:?}");
        for t in len..len + 9 {
            let want = push(subject, &mut *never, t..t + 1);
            assert_eq!(push(subject, &mut *restored, t..t + 1), want, "{subject:?} restored at {len}");
            assert_eq!(push(subject, &mut *saved, t..t + 1), want, "{subject:?} saved at {len}");
        }
        // A state that does not belong to such a layer is refused.
        let mut wrong = state.clone();
        wrong.counts = serde_json::json!({ "of": "another cache" });
        assert!(refuses(subject, wrong), "{subject:?}: counts of another cache");
        let wrong = LayerState { seq_len: 1 << (usize::BITS - 14), ..state.clone() };
        assert!(refuses(subject, wrong), "{subject:?}: more tokens than there are");
        for slot in (0..state.slots.len()).filter(|&slot| !state.slots[slot].is_empty()) {
            let mut wrong = state.clone();
            wrong.slots[slot].pop();
            assert!(refuses(subject, wrong), "{subject:?}: a tensor is missing");
            let mut wrong = state.clone();
            wrong.slots[slot][0] = TensorData::new(vec![0f32; 12], [1, 2, 2, 3]);
            assert!(refuses(subject, wrong), "{subject:?}: a tensor of another shape");
        }
    }
}

fn refuses(subject: &Subject<'_>, state: LayerState) -> bool {
    matches!((subject.build)().restore(state), Err(Error::Import { .. }))
}

fn reset_is_new(subject: &Subject<'_>) {
    let (mut used, mut new) = ((subject.build)(), (subject.build)());
    push(subject, &mut *used, 50..60);
    let before = used.usage().device;
    used.reset();
    let kept = used.usage().device;
    assert!(
        kept == 0 || kept == before,
        "{subject:?} frees its buffers, or keeps them for the next sequence"
    );
    assert_eq!((used.seq_len(), used.span(3)), (0, new.span(3)), "{subject:?}");
    let want = push(subject, &mut *new, 0..3);
    assert_eq!(push(subject, &mut *used, 0..3), want, "{subject:?}");
    assert!(kept == 0 || used.usage().device == kept, "{subject:?} uses the buffers that it kept");
}

fn encoder(cache: &mut ModelCache) -> &mut dyn CrossLayer {
    match cache.layers_mut().next() {
        Some((0, LayerCache { encoder: Some(encoder), .. })) => &mut **encoder,
        _ => unreachable!("there is one block, with an encoder"),
    }
}

/// Checks the laws of an encoder's memory on block 0 of `cache`, which must be new.
pub fn cross_conforms(cache: &mut ModelCache, need: &AttentionNeed, device: &Device) {
    let heard = need.streams().map(|stream| numbered(stream, 5, device));
    let [keys, values] = heard.clone();
    let layer = encoder(cache);
    assert!(layer.view().unwrap().is_none());
    let shorter = values.clone().narrow(3, 0, need.values.width - 1);
    assert!(matches!(layer.fill(keys.clone(), shorter), Err(Error::Import { .. })), "of another block");
    layer.fill(keys.clone(), values.clone()).unwrap();
    assert_eq!(layer.fill(keys, values), Err(Error::AlreadyConditioned), "written once");
    cache.truncate(0).unwrap();
    let saved = cache.save().unwrap();
    let stored = |cache: &mut ModelCache| {
        let KvView::Dense(stored) = encoder(cache).view().unwrap().unwrap() else {
            unreachable!("an encoder's keys are dense")
        };
        let (keys, values) = stored.in_order(KvSpan { start: 0, len: 5 });
        [floats(keys), floats(values)]
    };
    let want = heard.map(floats);
    assert_eq!(stored(cache), want, "decoded tokens leave no trace");
    cache.reset();
    assert!(encoder(cache).view().unwrap().is_none());
    cache.restore(saved).unwrap();
    assert_eq!(stored(cache), want, "saved and restored");
}

/// Vectors of `n` tokens, in which every number occurs once.
fn numbered(stream: Stream, n: usize, device: &Device) -> Tensor<4> {
    let numbers: Vec<f32> = (0..n * stream.numbers()).map(|i| i as f32).collect();
    Tensor::from_data(TensorData::new(numbers, stream.shape(1, n)), device)
}
