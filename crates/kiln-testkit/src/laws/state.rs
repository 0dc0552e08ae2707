//! Laws of recurrent layers.

use burn::tensor::{Device, Tensor, TensorData};
use kiln::expert::memory::{RecurrentNeed, RingEntries, RingNeed, Rings, StateLayer};

use super::feeding::floats;

/// Needs for which the laws must hold: of a state-space mixer, of a short convolution alone, of matrix states
/// per head, of several convolutions beside them, and of a single state with a journal.
pub fn state_needs() -> Vec<RecurrentNeed> {
    let inputs = |width, reach| RingNeed { groups: 1, width, entries: RingEntries::Inputs { reach } };
    let states = |groups, width| RingNeed { groups, width, entries: RingEntries::States };
    let journal = RingNeed { groups: 1, width: 3, entries: RingEntries::Journal };
    let older = RingNeed { groups: 4, width: 2, entries: RingEntries::OlderState };
    [
        vec![inputs(1, 2), states(1, 1)],
        vec![inputs(3, 2)],
        vec![states(2 * 3, 4)],
        vec![inputs(2, 3), states(6, 2), inputs(5, 1)],
        vec![inputs(2, 3), older, journal],
    ]
    .map(|rings| RecurrentNeed { rings })
    .into()
}

/// A layer of two rows, and the numbers that it was fed. The inputs and states of a token all have its
/// number. The numbers of the second row are ten times those of the first.
struct Fed<'a> {
    layer: Box<dyn StateLayer>,
    need: &'a RecurrentNeed,
    numbers: Vec<f32>,
    device: &'a Device,
}

impl Fed<'_> {
    /// Feeds numbers in one pass and writes the rings as kernels do.
    fn feed(&mut self, numbers: &[f32]) {
        let n = numbers.len();
        let mut rings = self.take(n);
        let journaled = self.layer.journaled();
        for (i, &number) in numbers.iter().enumerate() {
            let len = self.numbers.len() + 1;
            let mut older = number;
            for (ring, need) in rings.iter().zip(&self.need.rings) {
                if need.entries == RingEntries::Journal {
                    older = self.before((journaled + i + 1).min(need.history(ring.dims()[2])), number);
                }
            }
            for (ring, need) in rings.iter_mut().zip(&self.need.rings) {
                let [_, groups, slots, width] = ring.dims();
                let slot = need.latest(len) % slots;
                let own = if need.entries == RingEntries::OlderState { older } else { number };
                let row = |factor: f32| vec![factor * own; groups * width];
                let entry = self.tensor([2, groups, 1, width], [row(1.0), row(10.0)].concat());
                *ring = ring.clone().slice_assign([0..2, 0..groups, slot..slot + 1, 0..width], entry);
            }
            self.numbers.push(number);
        }
        self.layer.store(rings, n).unwrap();
        assert_eq!(self.layer.seq_len(), self.numbers.len());
    }

    /// The number of the token `back` tokens before the next one, `next`; 0 before the first.
    fn before(&self, back: usize, next: f32) -> f32 {
        match back {
            0 => next,
            _ => self.numbers.len().checked_sub(back).map_or(0.0, |i| self.numbers[i]),
        }
    }

    fn take(&mut self, tokens: usize) -> Rings {
        let inputs = self.tensor([2, tokens, 1], vec![0.0; 2 * tokens]);
        self.layer.take(&inputs).unwrap()
    }

    fn tensor<const D: usize>(&self, shape: [usize; D], numbers: Vec<f32>) -> Tensor<D> {
        Tensor::from_data(TensorData::new(numbers, shape), self.device)
    }

    fn truncate(&mut self, len: usize) {
        self.layer.truncate(len).unwrap();
        self.numbers.truncate(len);
    }

    /// Compares what the next token would read with what was fed. `factors` are the multipliers of the rows,
    /// which change when rows are reordered.
    fn check(&mut self, factors: [f32; 2], what: &str) {
        let len = self.numbers.len();
        assert_eq!(self.layer.seq_len(), len, "{what}");
        if len == 0 {
            return;
        }
        let rings = self.take(0);
        let journaled = self.layer.journaled();
        for (ring, need) in rings.iter().zip(&self.need.rings) {
            let [_, groups, slots, width] = ring.dims();
            let latest = need.latest(len);
            let reach = match need.entries {
                RingEntries::Inputs { reach } => reach,
                RingEntries::States => 1,
                RingEntries::Journal => journaled,
                RingEntries::OlderState => {
                    let last = self.before(journaled + 1, 0.0);
                    let want = factors.map(|factor| vec![factor * last; groups * width]);
                    assert_eq!(floats(ring.clone()), want.concat(), "{what}: {journaled} before {len}");
                    continue;
                }
            };
            for back in 0..reach.min(len) {
                let want = factors.map(|factor| vec![factor * self.numbers[len - 1 - back]; groups * width]);
                let got = floats(ring.clone().narrow(2, (latest - back) % slots, 1));
                assert_eq!(got, want.concat(), "{what}: {back} entries before the last of {len}, {need:?}");
            }
        }
        self.layer.store(rings, 0).unwrap();
    }
}

const ROWS: [f32; 2] = [1.0, 10.0];

/// Checks the laws of every recurrent layer. `build` creates new layers for `need`.
pub fn state_conforms(need: &RecurrentNeed, build: &dyn Fn() -> Box<dyn StateLayer>, device: &Device) {
    let new = || Fed { layer: build(), need, numbers: Vec::new(), device };
    let numbers = |range: std::ops::Range<usize>| range.map(|n| n as f32 + 1.0).collect::<Vec<_>>();

    // Every promised length can be returned to, however the tokens were divided into passes.
    for passes in [&[1; 8][..], &[3, 5], &[8], &[2, 1, 4, 1], &[30, 1, 2], &[1, 40]] {
        for back in 0..=4 {
            let mut fed = new();
            fed.layer.keep_history(4);
            for &n in passes {
                fed.feed(&numbers(fed.numbers.len()..fed.numbers.len() + n));
            }
            let len = fed.numbers.len();
            let what = format!("{} after passes of {passes:?}, {back} back", fed.layer.name());
            let Some(left) = len.checked_sub(back) else { continue };
            assert_eq!(fed.layer.rewind_point(left), left, "{what}");
            fed.truncate(left);
            fed.check(ROWS, &what);
            fed.feed(&numbers(90..92));
            fed.feed(&numbers(92..93));
            fed.check(ROWS, &what);
        }
    }

    // A pass can be taken back, whatever history was promised.
    for history in [0, 2] {
        let mut fed = new();
        fed.layer.keep_history(history);
        fed.feed(&numbers(0..6));
        fed.feed(&numbers(6..20));
        assert_eq!(fed.layer.rewind_point(6), 6, "before the pass");
        assert_eq!(fed.layer.rewind_point(10), 6, "no further");
        fed.truncate(6);
        fed.check(ROWS, "taken back");
        fed.feed(&numbers(50..51));
        fed.check(ROWS, "taken back, and on");
    }

    let mut fed = new();
    fed.layer.keep_history(4);
    (0..8).for_each(|n| fed.feed(&numbers(n..n + 1)));
    fed.truncate(6);
    assert_eq!(fed.layer.rewind_point(2), 0, "{} kept no more than was promised", fed.layer.name());
    // A longer history is promised while the rings are in use.
    fed.layer.keep_history(9);
    (20..29).for_each(|n| fed.feed(&numbers(n..n + 1)));
    assert_eq!(fed.layer.rewind_point(6), 6, "a late promise");
    fed.truncate(7);
    fed.check(ROWS, "a late promise");

    // Two continuations of a snapshot are independent.
    let mut other = Fed { layer: fed.layer.snapshot(), need, numbers: fed.numbers.clone(), device };
    for n in 40..44 {
        fed.feed(&numbers(n..n + 1));
        other.feed(&numbers(n + 20..n + 21));
        fed.check(ROWS, "a future");
        other.check(ROWS, "another future");
    }

    fed.layer.offload().unwrap();
    assert_eq!(fed.layer.usage().device, 0, "{} left nothing behind", fed.layer.name());
    assert_eq!(fed.layer.rewind_point(9), 9, "{} answers from host memory", fed.layer.name());
    fed.check(ROWS, "in host memory");
    fed.feed(&numbers(70..72));
    fed.check(ROWS, "fed in host memory");
    fed.layer.reorder(&[1, 0]).unwrap();
    fed.check([10.0, 1.0], "reordered");
    fed.truncate(11);
    fed.check([10.0, 1.0], "the past is reordered, too");
    assert!(fed.layer.reorder(&[2]).is_err(), "there are two rows");
    let one = fed.tensor([1, 1, 1], vec![0.0]);
    assert!(fed.layer.take(&one).is_err(), "there are two rows");
    fed.check([10.0, 1.0], "refused");

    let saved = fed.layer.save().unwrap();
    let mut restored = Fed { layer: build(), need, numbers: fed.numbers.clone(), device };
    restored.layer.restore(saved.clone()).unwrap();
    restored.check([10.0, 1.0], "restored");
    // A shorter history is promised than before.
    restored.layer.keep_history(1);
    restored.check([10.0, 1.0], "restored, and promised");
    fed.layer.reset();
    fed.numbers.clear();
    fed.feed(&numbers(0..3));
    fed.check(ROWS, "reset");
    for slot in 0..saved.slots.len() {
        let mut wrong = saved.clone();
        wrong.slots[slot] = vec![TensorData::new(vec![0f32; 12], [2, 2, 3, 1])];
        assert!(build().restore(wrong).is_err(), "a tensor of another shape");
    }
    let mut wrong = saved;
    wrong.slots.pop();
    assert!(build().restore(wrong).is_err(), "a tensor is missing");
}
