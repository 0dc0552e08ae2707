//! Rows that join and leave a cache between passes: each gives the bits that it gives alone, with every
//! cache, on every device.

use burn::tensor::{Tensor, TensorData};
use kiln::{
    Error, Model, Plan, TokenId,
    device::Opened,
    expert::{Batch, Generation, GenerationOptions, Logits, ModelCache},
};

use crate::{
    laws::{plans, plans_on},
    support::{batch, floats, greedy, recorded, some_on},
};

fn devices() -> impl Iterator<Item = (&'static str, &'static Opened)> {
    kiln_testkit::devices::opened().iter().map(|(name, opened)| (name.as_str(), opened))
}

/// Lengths below, at and above the windows and residuals of the samples.
const LENS: [usize; 4] = [9, 3, 26, 14];

fn prompt(model: &Model, row: usize) -> Vec<TokenId> {
    // Leaves room for the steps of a test.
    let len = LENS[row].min(model.causal().max_positions().map_or(usize::MAX, |positions| positions / 2));
    (0..len as TokenId).map(|i| (7 * i + 13 * row as TokenId + 3) % 97).collect()
}

/// Creates a cache with one row, and with encoder input if the model has an encoder.
fn row(model: &Model, plan: &Plan, row: usize) -> ModelCache {
    let mut cache = model.cache(plan).unwrap();
    cache.keep_history(2);
    let prompt = prompt(model, row);
    let features = model.causal().features().map(|shape| {
        let number = |i: usize| ((i + 1000 * row) as f32 * 0.731).sin();
        let numbers: Vec<f32> = (0..shape.bins * shape.frames).map(number).collect();
        Tensor::<3>::from_data(TensorData::new(numbers, [1, shape.bins, shape.frames]), model.device())
    });
    let whole = Batch { features, ..batch(model, &[prompt]) };
    let mut fed = 0;
    while fed < whole.len() {
        let n = cache.at_once().unwrap_or(whole.len()).min(whole.len() - fed);
        let _: Tensor<3> =
            model.causal().forward(&whole.slice(fed..fed + n), Logits::Last, &mut cache).unwrap();
        fed += n;
    }
    cache
}

/// Feeds one token to each row. Returns the bits of the logits.
fn step(model: &Model, cache: &mut ModelCache, tokens: &[TokenId]) -> Vec<u32> {
    let rows: Vec<Vec<TokenId>> = tokens.iter().map(|&token| vec![token]).collect();
    let logits = model.causal().forward(&batch(model, &rows), Logits::Last, cache).unwrap();
    floats(logits).into_iter().map(f32::to_bits).collect()
}

/// Rows in one cache, and each row in a separate cache.
struct Joined<'a> {
    model: &'a Model,
    together: ModelCache,
    /// Separate caches of the rows of `together`, in the same order.
    alone: Vec<ModelCache>,
    next: TokenId,
    what: String,
}

impl Joined<'_> {
    /// Feeds a token to every row `n` times and compares the results.
    fn steps(&mut self, n: usize) {
        for _ in 0..n {
            let tokens: Vec<TokenId> =
                (0..self.alone.len()).map(|row| (self.next + row as TokenId) % 97).collect();
            self.next += 5;
            let together = step(self.model, &mut self.together, &tokens);
            let alone = self.alone.iter_mut().zip(&tokens);
            let alone: Vec<u32> = alone.flat_map(|(row, &token)| step(self.model, row, &[token])).collect();
            assert!(together == alone, "{}: a row has other bits than alone", self.what);
        }
        let lens: Vec<usize> = self.alone.iter().map(ModelCache::seq_len).collect();
        assert_eq!(self.together.seq_lens(lens.len()), lens, "{}", self.what);
        assert_eq!(self.together.rows(), Some(lens.len()), "{}", self.what);
    }
}

#[test]
fn rows_that_joined_and_left_equal_rows_alone_bit_for_bit() {
    for (place, (device, opened)) in devices().enumerate() {
        let names = ["llama", "mamba", "whisper", "mistral"].into_iter().take(if place == 0 { 4 } else { 3 });
        for name in names {
            let model = recorded(name, opened);
            // The laws of layers test all, and offloading.
            let remembering = plans_on(place, &model).filter(|(_, plan, _)| plan.global.factory.remembers());
            for (text, plan, _) in some_on(device, remembering) {
                let own = |n: usize| row(&model, &plan, n);
                let what = format!("{text} of {name} on {device}");
                let mut rows = Joined { model: &model, together: own(0), alone: vec![own(0)], next: 4, what };
                rows.steps(2);
                for n in [1, 2, 3] {
                    rows.together.join(own(n)).unwrap();
                    rows.alone.push(own(n));
                    rows.steps(2);
                }
                // A snapshot and a restored cache continue like the original rows.
                let mut saved = model.cache(&plan).unwrap();
                saved.restore(rows.together.save().unwrap()).unwrap();
                for copy in [rows.together.snapshot(), saved] {
                    let alone = rows.alone.iter().map(ModelCache::snapshot).collect();
                    let what = format!("{}, copied", rows.what);
                    Joined { model: &model, together: copy, alone, next: 30, what }.steps(1);
                }
                // A row from the middle leaves, continues alone, and joins again as the last row.
                let left = rows.together.leave(1).unwrap();
                let mut apart = Joined {
                    model: &model,
                    together: left,
                    alone: vec![rows.alone.remove(1)],
                    next: 50,
                    what: format!("{}, left", rows.what),
                };
                apart.steps(2);
                rows.steps(1);
                rows.together.join(apart.together).unwrap();
                rows.alone.append(&mut apart.alone);
                rows.steps(2);
                // One of several rows that share a buffer leaves.
                rows.together.reorder(&[0, 0, 0, 2]).unwrap();
                rows.alone = [0, 0, 0, 2].map(|row: usize| rows.alone[row].snapshot()).into();
                rows.steps(1);
                drop(rows.together.leave(1).unwrap());
                rows.alone.remove(1);
                rows.steps(2);
                while rows.together.rows().is_some() {
                    let mut left = rows.together.leave(0).unwrap();
                    let (got, want) =
                        (step(&model, &mut left, &[9]), step(&model, &mut rows.alone.remove(0), &[9]));
                    assert!(got == want, "{}: a row that left has other bits", rows.what);
                }
                assert_eq!((rows.together.seq_len(), rows.alone.len()), (0, 0), "{}", rows.what);
                assert_eq!(rows.together.leave(0).unwrap_err(), Error::NoSuchRow { row: 0, rows: 0 });
            }
        }
    }
}

/// Some blocks share buffers and others do not, and rows outgrow their slots; then the cache is reset and
/// reused.
#[test]
fn rows_share_buffers_in_some_blocks_and_outgrow_them() {
    for (device, opened) in devices() {
        for name in ["llama", "gemma2", "jamba"] {
            let model = recorded(name, opened);
            for text in ["dynamic", "static:len=60"] {
                let plan = Plan::named(text).unwrap();
                let mut together = row(&model, &plan, 0);
                (1..3).for_each(|n| together.join(row(&model, &plan, n)).unwrap());
                let what = format!("{text} of {name} on {device}");
                let alone = (0..3).map(|n| row(&model, &plan, n)).collect();
                let mut rows = Joined { model: &model, together, alone, next: 3, what };
                rows.steps(1);
                assert!(rows.together.bases(3).iter().any(|&base| base > 0), "{}: rows share", rows.what);
                // Rows get different lengths and are rolled back where possible.
                let lens: Vec<usize> = rows.alone.iter().map(|row| row.seq_len() - 2).collect();
                if rows.together.rewind_points(&lens) == lens {
                    rows.together.truncate_rows(&lens).unwrap();
                    rows.alone.iter_mut().zip(&lens).for_each(|(row, &len)| row.truncate(len).unwrap());
                }
                rows.steps(if text == "dynamic" { 45 } else { 10 });
                assert!(rows.together.device_bytes() > 0);
                rows.together.reset();
                let prompt = batch(&model, &[vec![1, 2, 3]]);
                let logits = |cache: &mut ModelCache| {
                    floats(model.causal().forward(&prompt, Logits::Last, cache).unwrap())
                };
                let again = logits(&mut rows.together);
                assert_eq!(again, logits(&mut model.cache(&plan).unwrap()), "{}", rows.what);
            }
        }
    }
}

/// A row that comes takes the room of one that left, and the others stay where they are.
#[test]
fn rows_that_come_take_the_room_of_rows_that_left() {
    for (device, opened) in devices() {
        for name in ["llama", "gemma2"] {
            let model = recorded(name, opened);
            let plan = Plan::named("static:len=60").unwrap();
            let own = |n: usize| row(&model, &plan, n % 4);
            let mut together = own(0);
            (1..5).for_each(|n| together.join(own(n)).unwrap());
            let what = format!("{name} on {device}");
            let alone = (0..5).map(own).collect();
            let mut rows = Joined { model: &model, together, alone, next: 3, what };
            rows.steps(1);
            let bytes = rows.together.device_bytes();
            for round in 0..6 {
                let before = rows.together.bases(5);
                let leaving = round % 3;
                drop((rows.together.leave(leaving).unwrap(), rows.alone.remove(leaving)));
                if round % 2 == 0 {
                    rows.steps(1);
                }
                rows.together.join(own(round)).unwrap();
                rows.alone.push(own(round));
                rows.steps(2);
                let mut wanted = before;
                let room = wanted.remove(leaving);
                wanted.push(room);
                assert_eq!(rows.together.bases(5), wanted, "{}, round {round}", rows.what);
                assert_eq!(rows.together.device_bytes(), bytes, "{}, round {round}", rows.what);
            }
            // Most of the room is free: the rest moves together, with rows that come.
            for _ in 0..4 {
                drop((rows.together.leave(0).unwrap(), rows.alone.remove(0)));
            }
            rows.together.join(own(1)).unwrap();
            rows.alone.push(own(1));
            rows.steps(2);
            assert!(rows.together.device_bytes() <= bytes / 2, "{}", rows.what);
        }
    }
}

/// A device whose buffers are too small for all rows: they keep buffers of their own, until fewer are left.
#[test]
fn rows_share_no_buffer_larger_than_the_device_allows() {
    for (device, opened) in devices() {
        let model = recorded("llama", opened);
        let plan = Plan::dynamic();
        let mut together = row(&model, &plan, 0);
        (1..4).for_each(|n| together.join(row(&model, &plan, n)).unwrap());
        let what = format!("small buffers on {device}");
        let alone = (0..4).map(|n| row(&model, &plan, n)).collect();
        let mut rows = Joined { model: &model, together, alone, next: 3, what };
        let largest = model.budget().largest_buffer();
        // Keys of three of the four rows in a block.
        let block = rows.together.device_bytes() / rows.together.blocks() / 2;
        model.budget().set_largest_buffer(Some(block as u64 * 3 / 4));
        rows.steps(2);
        let apart = rows.together.bases(4).iter().all(|&base| base == 0);
        for _ in 0..2 {
            drop((rows.together.leave(2).unwrap(), rows.alone.remove(2)));
        }
        rows.steps(2);
        let shared = rows.together.bases(2).iter().any(|&base| base > 0);
        model.budget().set_largest_buffer(largest);
        assert_eq!((apart, shared), (true, true), "on {device}");
    }
}

/// Steps in which the device chooses tokens, recorded if the device can.
#[test]
fn joined_rows_generate_the_tokens_that_each_gives_alone() {
    for (device, opened) in devices() {
        for name in ["llama", "gemma2", "jamba"] {
            let model = recorded(name, opened);
            let generate = |rows: &[usize]| {
                let mut cache = row(&model, &Plan::dynamic(), rows[0]);
                rows[1..].iter().for_each(|&n| cache.join(row(&model, &Plan::dynamic(), n)).unwrap());
                let next: Vec<Vec<TokenId>> = rows.iter().map(|&n| vec![n as TokenId + 5]).collect();
                let whole =
                    rows.iter().zip(&next).map(|(&n, next)| [prompt(&model, n), next.clone()].concat());
                let options = GenerationOptions {
                    settings: greedy(12).resolve().unwrap(),
                    kernels: Some(model.kernels().clone()),
                    compile: true,
                    ..GenerationOptions::default()
                };
                let (fed, whole) = (batch(&model, &next), whole.collect());
                let generation =
                    Generation::new(model.causal().clone(), &mut cache, fed, whole, options).unwrap();
                generation.map(|step| step.unwrap().tokens).collect::<Vec<_>>()
            };
            let together = generate(&[0, 1, 2]);
            for row in 0..3 {
                let own: Vec<_> = together.iter().map(|step| vec![step[row]]).collect();
                assert_eq!(own, generate(&[row]), "{name} on {device}, row {row}");
            }
        }
    }
}

#[test]
fn rows_of_different_strategies_share_a_pass() {
    for (device, opened) in devices() {
        let model = recorded("llama", opened);
        let all: Vec<_> = plans(&model).filter(|(_, plan, _)| plan.global.factory.remembers()).collect();
        for neighbours in all.chunks(4) {
            let caches = || neighbours.iter().enumerate().map(|(n, (_, plan, _))| row(&model, plan, n));
            let mut together = caches().next().unwrap();
            caches().skip(1).for_each(|cache| together.join(cache).unwrap());
            let what =
                format!("{:?} on {device}", neighbours.iter().map(|(text, ..)| text).collect::<Vec<_>>());
            Joined { model: &model, together, alone: caches().collect(), next: 3, what }.steps(4);
        }
    }
}

/// A cache that retains nothing has the rows of its last pass.
#[test]
fn caches_that_keep_nothing_can_be_joined() {
    let (_, opened) = devices().next().unwrap();
    let model = recorded("llama", opened);
    let none = Plan::named("none").unwrap();
    let mut cache = model.cache(&none).unwrap();
    assert_eq!(cache.rows(), None);
    step(&model, &mut cache, &[1, 2]);
    let mut other = model.cache(&none).unwrap();
    step(&model, &mut other, &[3]);
    cache.join(other).unwrap();
    assert_eq!(cache.rows(), Some(3));
    // An empty cache has no rows.
    cache.join(model.cache(&Plan::dynamic()).unwrap()).unwrap();
    assert_eq!(cache.rows(), Some(3));
    cache.join(row(&model, &Plan::dynamic(), 1)).unwrap();
    let rows = step(&model, &mut cache, &[1, 2, 3, 4]);
    let vocab = rows.len() / 4;
    assert!(rows[vocab..2 * vocab] == step(&model, &mut model.cache(&none).unwrap(), &[2]));
    assert_eq!(cache.leave(3).unwrap().seq_len(), LENS[1] + 1);
    assert_eq!(cache.leave(3).unwrap_err(), Error::NoSuchRow { row: 3, rows: 3 });
}

#[test]
fn the_cache_of_another_model_cannot_join() {
    let (_, opened) = devices().next().unwrap();
    // The last two have equally many blocks.
    for names in [["llama", "mamba"], ["mamba2", "lfm2"]] {
        let [one, other] = names.map(|name| recorded(name, opened));
        let mut cache = row(&one, &Plan::dynamic(), 0);
        let refused = cache.join(row(&other, &Plan::dynamic(), 1)).unwrap_err();
        assert!(matches!(refused, Error::WrongMemory { .. }), "{refused}");
        assert_eq!((cache.rows(), cache.seq_len()), (Some(1), LENS[0]));
    }
}

/// After a failed pass, rows that cannot be rolled back leave, and the others continue.
#[test]
fn a_failed_row_leaves_and_the_others_continue() {
    let (_, opened) = devices().next().unwrap();
    let model = recorded("llama", opened);
    // Without promised history, a full window cannot restore the tokens that it dropped.
    let sink = Plan::named("sink:window=6,sinks=2").unwrap();
    let full = || {
        let mut cache = model.cache(&sink).unwrap();
        (0..20).for_each(|token| drop(step(&model, &mut cache, &[token])));
        cache
    };
    let mut cache = row(&model, &Plan::dynamic(), 0);
    cache.join(full()).unwrap();
    cache.join(row(&model, &Plan::dynamic(), 2)).unwrap();
    let used = model.budget().used();
    // In a layer after the first one: row 1 has stored a token there.
    model.budget().fail_allocation(2);
    let next = batch(&model, &[vec![1], vec![2], vec![3]]);
    let failed = model.causal().forward(&next, Logits::Last, &mut cache).map(drop).unwrap_err();
    assert!(matches!(failed, Error::OutOfMemory { .. }), "{failed}");
    assert_eq!((cache.is_poisoned(), cache.poisoned_rows()), (true, vec![1]));
    assert_eq!(cache.seq_lens(3), [LENS[0], 0, LENS[2]]);
    let refused = model.causal().forward(&next, Logits::Last, &mut cache).map(drop).unwrap_err();
    assert_eq!(refused, Error::Row { row: 1, why: Box::new(Error::Poisoned) });
    assert_eq!(refused.to_string(), "row 1: the cache failed in the middle of a forward pass; reset it");

    let left = cache.leave(1).unwrap();
    assert_eq!((left.is_poisoned(), left.rows(), left.device_bytes()), (false, None, 0));
    assert!(model.budget().used() < used, "the memory of the row is free");
    let alone = vec![row(&model, &Plan::dynamic(), 0), row(&model, &Plan::dynamic(), 2)];
    Joined { model: &model, together: cache, alone, next: 7, what: "after a failure".to_owned() }.steps(3);
}

/// An error names its row if the rows differ.
#[test]
fn errors_name_the_row() {
    let (_, opened) = devices().next().unwrap();
    let model = recorded("llama", opened);
    let small = Plan::named("static:len=4").unwrap();
    let mut cache = row(&model, &Plan::dynamic(), 0);
    cache.join(row(&model, &small, 1)).unwrap();
    step(&model, &mut cache, &[1, 2]);
    let next = batch(&model, &[vec![1], vec![2]]);
    let full = model.causal().forward(&next, Logits::Last, &mut cache).map(drop).unwrap_err();
    assert_eq!(full, Error::Row { row: 1, why: Box::new(Error::Full { capacity: 4, needed: 5 }) });
    assert_eq!(cache.seq_lens(2), [LENS[0] + 1, 4], "nothing was changed");
    assert_eq!(cache.truncate_rows(&[0, 4]), Ok(()));
}
