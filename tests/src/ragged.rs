//! Rows of different lengths: each gives the results that it gives alone, with every cache, on every device.

use burn::tensor::Tensor;
use kiln::{
    Model, Plan, Sequence, TokenId,
    device::Opened,
    expert::{Batch, Generation, GenerationOptions, Logits, ModelCache, memory::CacheState, read_back},
};

use crate::{
    laws::{plans, remembering},
    support::{assert_close, batch, floats, forward, greedy, recorded},
};

/// Lengths below, at and above the windows and residuals of the samples.
const LENS: [usize; 4] = [9, 3, 26, 14];

fn prompt(row: usize) -> Vec<TokenId> {
    (0..LENS[row] as TokenId).map(|i| (7 * i + 13 * row as TokenId + 3) % 97).collect()
}

fn prompts() -> Vec<Vec<TokenId>> {
    (0..LENS.len()).map(prompt).collect()
}

fn devices() -> impl Iterator<Item = (&'static str, &'static Opened)> {
    kiln_testkit::devices::opened().iter().map(|(name, opened)| (name.as_str(), opened))
}

/// Rows in one cache, and each row in a separate cache.
struct Rows<'a> {
    model: &'a Model,
    together: ModelCache,
    alone: Vec<ModelCache>,
    what: String,
}

impl<'a> Rows<'a> {
    fn new(model: &'a Model, plan: &Plan, what: String) -> Self {
        let cache = || {
            let mut cache = model.cache(plan).unwrap();
            cache.keep_history(4);
            cache
        };
        Self { model, together: cache(), alone: LENS.map(|_| cache()).into(), what }
    }

    /// Feeds tokens to the rows, in chunks of `chunk` columns, and compares the last logits of each row with
    /// those of the row alone.
    fn feed(&mut self, rows: &[Vec<TokenId>], chunk: usize) {
        let fed = Batch::ragged(rows, 0, self.model.device()).unwrap();
        let logits = floats(prefilled(self.model, &mut self.together, &fed, Some(chunk)));
        let vocab = self.model.sizes().vocab;
        for (row, (tokens, alone)) in rows.iter().zip(&mut self.alone).enumerate() {
            let own = batch(self.model, std::slice::from_ref(tokens));
            let want = floats(prefilled(self.model, alone, &own, None));
            assert_close(&logits[row * vocab..][..vocab], &want, &format!("{}, row {row}", self.what));
        }
        let lens: Vec<usize> = self.alone.iter().map(ModelCache::seq_len).collect();
        assert_eq!(self.together.seq_lens(rows.len()), lens, "{}", self.what);
    }

    fn step(&mut self, token: TokenId) {
        let rows: Vec<Vec<TokenId>> = (0..self.alone.len()).map(|row| vec![token + row as TokenId]).collect();
        self.feed(&rows, 1);
    }
}

fn prefilled(model: &Model, cache: &mut ModelCache, fed: &Batch, chunk: Option<usize>) -> Tensor<3> {
    read_back::block_on(kiln::expert::prefill(model.causal().clone(), cache, fed, chunk)).unwrap()
}

#[test]
fn rows_of_different_lengths_give_the_logits_of_rows_alone() {
    for (place, (device, opened)) in devices().enumerate() {
        for name in ["llama", "mamba", "mistral"].into_iter().take(if place == 0 { 3 } else { 2 }) {
            let model = recorded(name, opened);
            // Offloaded caches on one device only, to save time: the laws of layers test offloading on every
            // device.
            let all = remembering(&model).filter(|(text, ..)| place == 0 || !text.contains("offloaded"));
            for (text, plan, _) in all {
                let mut rows = Rows::new(&model, &plan, format!("{text} of {name} on {device}"));
                rows.feed(&prompts(), 100);
                (20..26).for_each(|token| rows.step(token));

                // Each row is rolled back by a different length.
                let lens: Vec<usize> = LENS.iter().zip([2, 0, 3, 1]).map(|(len, n)| len + 6 - n).collect();
                if rows.together.rewind_points(&lens) == lens {
                    rows.together.truncate_rows(&lens).unwrap();
                    for (alone, &len) in rows.alone.iter_mut().zip(&lens) {
                        alone.truncate(len).unwrap();
                    }
                    (40..42).for_each(|token| rows.step(token));
                }

                // Restored from a saved state or not, reordered, and fed more than one token in some rows.
                let state = rows.together.save().unwrap();
                rows.together = model.cache(&plan).unwrap();
                rows.together.restore(state).unwrap();
                rows.together.reorder(&[2, 0, 0, 3]).unwrap();
                rows.alone = [2, 0, 0, 3].map(|row: usize| rows.alone[row].snapshot()).into();
                rows.feed(&[vec![5, 6], vec![7], vec![8, 9, 10], vec![11]], 100);
                (50..53).for_each(|token| rows.step(token));
                rows.together.reset();
                assert_eq!(
                    (rows.together.seq_len(), rows.together.seq_lens(4)),
                    (0, vec![0; 4]),
                    "{}",
                    rows.what
                );
            }
        }
    }
}

#[test]
fn prompts_of_different_lengths_can_be_fed_in_chunks() {
    for (device, opened) in devices() {
        for name in ["llama", "llama_rope_dynamic", "mamba"] {
            let model = recorded(name, opened);
            for (text, plan, exact) in remembering(&model).filter(|(text, ..)| !text.contains("offloaded")) {
                // Caches that depend on how they were fed are fed in the same chunks.
                let chunks: &[usize] = if exact { &[1, 5, 11, 100] } else { &[100] };
                for &chunk in chunks {
                    let what = format!("{text} of {name} on {device}, chunks of {chunk}");
                    let mut rows = Rows::new(&model, &plan, what);
                    rows.feed(&prompts(), chunk);
                    rows.step(30);
                }
            }
        }
    }
}

/// Through the generation loop: the device samples, steps are captured if possible, and tokens are read one
/// step late.
#[test]
fn each_row_generates_the_tokens_that_it_gives_alone() {
    for (device, opened) in devices() {
        let model = recorded("llama", opened);
        for (text, plan, _) in plans(&model).filter(|(text, ..)| !text.contains("offloaded")) {
            let generate = |rows: &[Vec<TokenId>], cache: &mut ModelCache| {
                let options = GenerationOptions {
                    settings: greedy(12).resolve().unwrap(),
                    lookahead: true,
                    compile: true,
                    kernels: Some(model.kernels().clone()),
                    ..GenerationOptions::default()
                };
                let batch = Batch::ragged(rows, 0, model.device()).unwrap();
                let steps =
                    Generation::new(model.causal().clone(), cache, batch, rows.to_vec(), options).unwrap();
                let steps: Vec<_> = steps.map(|step| step.unwrap().tokens).collect();
                (0..rows.len()).map(|row| steps.iter().filter_map(|step| step[row]).collect()).collect()
            };
            let mut cache = model.cache(&plan).unwrap();
            let together: Vec<Vec<TokenId>> = generate(&prompts(), &mut cache);
            for (row, tokens) in together.iter().enumerate() {
                let alone = generate(&[prompt(row)], &mut model.cache(&plan).unwrap());
                assert_eq!(*tokens, alone[0], "{text} on {device}, row {row}");
            }
            if plan.global.factory.remembers() {
                assert_eq!(cache.seq_lens(4), LENS.map(|len| len + 11), "{text} on {device}");
            }
        }
    }
}

/// Prompts of different lengths with a cache that does not support padding, and conversations that diverge in
/// length.
#[test]
fn rows_of_a_conversation_may_grow_by_different_lengths() {
    for (device, opened) in devices() {
        let model = recorded("llama", opened);
        for text in ["dynamic", "sink:window=12,sinks=2"] {
            let plan = Plan::named(text).unwrap();
            let ask = |sequence: &mut Sequence, rows: &[Vec<TokenId>]| {
                let steps =
                    model.generate(rows.to_vec()).sequence(sequence).config(greedy(4)).steps().unwrap();
                let reuse = steps.reuse();
                let steps: Vec<_> = steps.map(|step| step.unwrap().tokens).collect();
                let new = |row: usize| steps.iter().filter_map(|step| step[row]).collect::<Vec<_>>();
                ((0..rows.len()).map(new).collect::<Vec<_>>(), reuse)
            };
            // Equal lengths first, and then padded rows if the cache supports them.
            for first in [[0, 0], [0, 1]] {
                let mut rows = first.map(prompt).to_vec();
                let mut together = Sequence::new(&model, &plan).unwrap();
                let mut alone = [0, 1].map(|_| Sequence::new(&model, &plan).unwrap());
                // First the longer row grows more, then the shorter one, then both by the same length.
                for (turn, grow) in [[3, 1], [1, 4], [2, 2], [1, 9]].into_iter().enumerate() {
                    let what = format!("{text} on {device}, from {first:?}, turn {turn}");
                    let (new, reuse) = ask(&mut together, &rows);
                    for (row, sequence) in alone.iter_mut().enumerate() {
                        let (own, _) = ask(sequence, std::slice::from_ref(&rows[row]));
                        assert_eq!(new[row], own[0], "{what}, row {row}");
                    }
                    assert_eq!((reuse.forgotten, reuse.reused > 0), (0, turn > 0), "{what}");
                    for ((row, new), grow) in rows.iter_mut().zip(new).zip(grow) {
                        row.extend(new.into_iter().chain((0..grow).map(|i| 5 + i)));
                    }
                }
            }
        }
        // A shorter prompt from the start.
        let plan = Plan::named("sink:window=12,sinks=2").unwrap();
        let generate = |rows: Vec<Vec<TokenId>>| {
            let mut cache = model.cache(&plan).unwrap();
            let steps = model.generate(rows).cache(&mut cache).config(greedy(4)).steps().unwrap();
            steps.map(|step| step.unwrap().tokens).collect::<Vec<_>>()
        };
        let together = generate(vec![prompt(0), prompt(1)]);
        for row in 0..2 {
            let alone = generate(vec![prompt(row)]);
            let own: Vec<_> = together.iter().map(|step| vec![step[row]]).collect();
            assert_eq!(own, alone, "on {device}, row {row}");
        }
    }
}

#[test]
fn operations_that_do_not_fit_the_rows_are_errors() {
    let (_, opened) = devices().next().unwrap();
    let model = recorded("llama", opened);
    let mut cache = model.cache(&Plan::dynamic()).unwrap();
    let fed = Batch::ragged(&prompts(), 0, model.device()).unwrap();
    model.causal().forward(&fed, Logits::Last, &mut cache).unwrap();
    let wrong = kiln::Error::WrongRows { rows: 4, given: 2 };
    let two = Batch::ragged(&prompts()[..2], 0, model.device()).unwrap();
    let refused = model.causal().forward(&two, Logits::Last, &mut cache).map(|_: Tensor<3>| ());
    assert_eq!(refused, Err(wrong.clone()));
    assert_eq!(cache.truncate_rows(&[1, 2]), Err(wrong));
    assert_eq!(cache.reorder(&[4]), Err(kiln::Error::NoSuchRow { row: 4, rows: 4 }));
    assert!(cache.to_legacy().is_err(), "a rectangle cannot hold them");
    assert_eq!(cache.seq_lens(4), LENS, "nothing was changed");

    let prefill = |rows: &[Vec<TokenId>], cache: &mut ModelCache| {
        let fed = Batch::ragged(rows, 0, model.device()).unwrap();
        read_back::block_on(kiln::expert::prefill(model.causal().clone(), cache, &fed, Some(usize::MAX)))
            .map(|_| ())
    };
    let five = [prompts(), vec![prompt(0)]].concat();
    assert_eq!(prefill(&five, &mut cache), Err(kiln::Error::WrongRows { rows: 4, given: 5 }));
    let mut fed = Batch::ragged(&prompts(), 0, model.device()).unwrap();
    fed.skip[1] = fed.len();
    let refused = read_back::block_on(kiln::expert::prefill(model.causal().clone(), &mut cache, &fed, None))
        .map(|_| ());
    assert!(matches!(refused, Err(kiln::Error::Prompt { .. })), "a row without a token");
    fed.left_pad.clear();
    let refused = model.causal().forward(&fed, Logits::Last, &mut cache).map(|_| ());
    assert!(matches!(refused, Err(kiln::Error::Prompt { .. })), "paddings of no row");
    assert_eq!(cache.seq_lens(4), LENS, "nothing was changed");

    let saved = cache.save().unwrap();
    for rows in [vec![2, 1, 1, 1], vec![1, 1, 1], vec![1 << 63, 1 << 63, 3, 1], vec![0, 1, 1, 1], vec![1]] {
        let state = CacheState { rows: rows.clone(), ..saved.clone() };
        let mut other = model.cache(&Plan::dynamic()).unwrap();
        assert!(matches!(other.restore(state), Err(kiln::Error::Import { .. })), "{rows:?}");
    }

    // A single remaining row behaves like any other batch.
    cache.reorder(&[2]).unwrap();
    assert_eq!(prefill(&[vec![1], vec![2]], &mut cache), Err(kiln::Error::WrongRows { rows: 1, given: 2 }));
    prefill(&[vec![1]], &mut cache).unwrap();
    cache.truncate_rows(&[5]).unwrap();
    assert_eq!((cache.seq_len(), cache.to_legacy().is_ok()), (5, true));
}

/// A cache that refused a batch, or is empty, accepts any number of rows.
#[test]
fn an_empty_cache_accepts_any_number_of_rows() {
    let (_, opened) = devices().next().unwrap();
    let model = recorded("llama", opened);
    let forward = |rows: &[Vec<TokenId>], cache: &mut ModelCache| {
        let fed = Batch::ragged(rows, 0, model.device()).unwrap();
        model.causal().forward(&fed, Logits::Last, cache).map(|_| ())
    };
    let two = [vec![1, 2], vec![3]];
    for text in ["static:len=8", "none", "dynamic"] {
        let mut cache = model.cache(&Plan::named(text).unwrap()).unwrap();
        cache.truncate_rows(&[]).unwrap();
        assert_eq!(forward(&prompts(), &mut cache).is_err(), text == "static:len=8", "{text}");
        cache.truncate(0).unwrap();
        forward(&two, &mut cache).unwrap();
        cache.reset();
        forward(&prompts()[1..2], &mut cache).unwrap();
        let mut ragged = model.cache(&Plan::named(text).unwrap()).unwrap();
        forward(&two, &mut ragged).unwrap();
        ragged.reorder(&[]).unwrap();
        forward(&prompts()[1..2], &mut ragged).unwrap();
    }
}

/// A saved file can contain rows of different lengths.
#[test]
fn rows_of_different_lengths_are_saved() {
    let (_, opened) = devices().next().unwrap();
    let model = recorded("llama", opened);
    let folder = tempfile::tempdir().unwrap();
    for text in ["dynamic", "sink:window=12,sinks=2", "quantized:group=8,residual=8"] {
        let (plan, path) = (Plan::named(text).unwrap(), folder.path().join("cache.safetensors"));
        let mut cache = model.cache(&plan).unwrap();
        let fed = Batch::ragged(&prompts(), 0, model.device()).unwrap();
        prefilled(&model, &mut cache, &fed, None);
        model.save_cache(&path, &plan, &mut cache, &prompts(), &[0; 4]).unwrap();
        let mut loaded = model.load_cache(&path, &plan).unwrap();
        assert_eq!((loaded.tokens, loaded.cache.seq_lens(4)), (prompts(), LENS.to_vec()), "{text}");
        let next = batch(&model, &[vec![1], vec![2], vec![3], vec![4]]);
        let want = forward(&model, &next, &mut cache);
        assert_close(&forward(&model, &next, &mut loaded.cache), &want, text);
    }
}
