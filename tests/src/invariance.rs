//! Batch invariance: the result of a token does not depend on what is computed in the same pass, bit for bit,
//! for up to 16 tokens in total (rows times tokens). A pass that verifies several tokens therefore gives the
//! logits of separate passes. Where a model says so, it is true of more rows with one token each.

use kiln::{
    DtypeChoice, Mixture, Model, Plan, TokenId,
    device::Opened,
    expert::{
        ModelCache,
        kernels::{Choice, INVARIANT_UP_TO},
    },
};

use crate::{
    laws::remembering,
    support::{architectures, batch, cases_are, fixtures_of, forward, llama_with, recorded, some_on},
};

/// Longer than the windows of the models that have one.
const PROMPT: usize = 20;

fn devices() -> impl Iterator<Item = (&'static str, &'static Opened)> {
    kiln_testkit::devices::opened().iter().map(|(name, opened)| (name.as_str(), opened))
}

fn tokens(row: usize, n: usize) -> Vec<TokenId> {
    (0..n as TokenId).map(|i| (i * i + 7 * i + 31 * row as TokenId + 3) % 97).collect()
}

/// Feeds `rows` in pieces of these lengths. Returns the bits of the logits of every token in order, for each
/// row.
fn fed(model: &Model, cache: &mut ModelCache, rows: &[Vec<TokenId>], pieces: &[usize]) -> Vec<Vec<u32>> {
    let vocab = model.sizes().vocab;
    let mut logits = vec![Vec::new(); rows.len()];
    let mut start = 0;
    for n in pieces {
        let piece: Vec<_> = rows.iter().map(|row| row[start..start + n].to_vec()).collect();
        let all = forward(model, &batch(model, &piece), cache);
        for (logits, own) in logits.iter_mut().zip(all.chunks(n * vocab)) {
            logits.extend(own.iter().map(|logit| logit.to_bits()));
        }
        start += n;
    }
    logits
}

/// Returns models with plans that give a query all visible keys, however tokens were fed: all such plans with
/// a model of full attention and one with windows, and one plan with every other model.
fn subjects(
    device: &str,
    opened: &Opened,
) -> impl Iterator<Item = (&'static str, Model, Vec<(String, Plan)>)> {
    let is_kept = move |(i, name): &(usize, &str)| {
        let is_short = cases_are("some") && device != "cpu";
        !is_short || i.is_multiple_of(3) || ["llama", "gemma2"].contains(name)
    };
    architectures().enumerate().filter(is_kept).map(|(_, name)| {
        let model = recorded(name, opened);
        let exact = remembering(&model).filter(|(_, plan, exact)| *exact && plan.offload.is_none());
        let most = if ["llama", "gemma2"].contains(&name) { usize::MAX } else { 1 };
        let plans = exact.map(|(text, plan, _)| (text, plan)).take(most).collect();
        (name, model, plans)
    })
}

/// Pieces in which 16 tokens are fed after the prompt.
const PIECES: [&[usize]; 3] = [&[16], &[2, 3, 11], &[5, 4, 7]];

/// Compares several tokens of a row in one pass, after a prompt, with the same tokens one by one.
fn tokens_fail(model: &Model, plan: &Plan, together: &[&[usize]]) -> Option<String> {
    let row = [tokens(0, PROMPT + INVARIANT_UP_TO)];
    let run = |pieces: &[usize]| {
        let mut cache = model.cache(plan).unwrap();
        cache.keep_history(INVARIANT_UP_TO);
        let pieces: Vec<_> = [PROMPT].into_iter().chain(pieces.iter().copied()).collect();
        fed(model, &mut cache, &row, &pieces).remove(0)
    };
    let one_by_one = run(&[1; INVARIANT_UP_TO]);
    let differ = together.iter().find(|pieces| run(pieces) != one_by_one)?;
    Some(format!("tokens in pieces of {differ:?}"))
}

/// Compares the rows of a batch with each row alone.
fn rows_fail(model: &Model, plan: &Plan) -> Option<String> {
    let fed =
        |rows: &[Vec<TokenId>], pieces: &[usize]| fed(model, &mut model.cache(plan).unwrap(), rows, pieces);
    // Never more than 16 tokens at once, not even at the start; then as many rows as the model allows.
    let all = model.causal().exact_rows().min(64);
    let most = Some((all, vec![1; 3])).filter(|_| all > INVARIANT_UP_TO);
    let few = [(2, vec![8, 1, 7]), (5, vec![1, 3, 2, 3]), (INVARIANT_UP_TO, vec![1; 9])];
    for (n, pieces) in few.into_iter().chain(most) {
        let rows: Vec<_> = (0..n).map(|row| tokens(row, pieces.iter().sum())).collect();
        let together = fed(&rows, &pieces);
        for row in [0, n - 1] {
            if fed(&rows[row..=row], &pieces)[0] != together[row] {
                return Some(format!("row {row} of a batch of {n}"));
            }
        }
    }
    None
}

#[test]
fn logits_do_not_depend_on_how_16_tokens_are_divided_into_passes() {
    let mut failures = Vec::new();
    for (device, opened) in devices() {
        for (name, model, plans) in subjects(device, opened) {
            for (text, plan) in plans {
                let why = tokens_fail(&model, &plan, &PIECES);
                failures.extend(why.map(|why| format!("{text} of {name} on {device}: {why}")));
            }
        }
    }
    assert!(failures.is_empty(), "{} fail:\n{}", failures.len(), failures.join("\n"));
}

/// Which keys a query sees in quantized form depends on the first token that was fed with it. Tokens in the
/// same block see the same.
#[test]
fn logits_of_a_quantized_cache_do_not_depend_on_passes_within_a_block() {
    for (device, opened) in devices() {
        let model = recorded("llama", opened);
        for settings in ["k=8,v=8", "k=2,v=4", "nbits=8,format=hqq,axis_key=1,axis_value=1"] {
            let text = format!("quantized:{settings},group=8,residual=8");
            let why = tokens_fail(&model, &Plan::named(&text).unwrap(), &[&[4, 8, 4], &[1, 3, 5, 3, 4]]);
            assert_eq!(why, None, "{text} on {device}");
        }
    }
}

#[test]
fn logits_do_not_depend_on_other_rows_of_the_batch() {
    let mut failures = Vec::new();
    for (device, opened) in devices() {
        for (name, model, plans) in subjects(device, opened) {
            for (text, plan) in plans {
                let why = rows_fail(&model, &plan);
                failures.extend(why.map(|why| format!("{text} of {name} on {device}: {why}")));
            }
        }
    }
    assert!(failures.is_empty(), "{} fail:\n{}", failures.len(), failures.join("\n"));
}

/// Matrix units multiply more rows in 16 bits.
#[test]
fn logits_in_16_bits_do_not_depend_on_other_rows_of_the_batch() {
    let mut failures = Vec::new();
    for (device, opened) in devices().filter(|(device, _)| *device != "cpu") {
        for (fits_float16, dtype) in [(true, DtypeChoice::F16), (false, DtypeChoice::Bf16)] {
            if opened.half_dtype(fits_float16).is_none() {
                continue;
            }
            for (name, quant) in some_on(device, architectures().map(|name| (name, None))).chain([
                ("llama", None),
                ("llama", Some(Mixture::Q8_0)),
                ("mistral", Some(Mixture::Q4_0)),
            ]) {
                let folder = fixtures_of(name).join("models").join(name);
                let builder = Model::builder(&folder).opened(opened.clone()).dtype(dtype);
                let model = builder.quant(quant).load().unwrap();
                if fits_float16 && name == "llama" && device.starts_with("cuda") {
                    let want = if opened.info.matrix_units.is_some() { 64 } else { INVARIANT_UP_TO };
                    assert_eq!(model.exact_rows(), want, "rows of {name} ({quant:?}) on {device}");
                }
                let exact = remembering(&model).filter(|(_, plan, exact)| *exact && plan.offload.is_none());
                let most = if name == "llama" && quant.is_none() { usize::MAX } else { 1 };
                for (text, plan, _) in exact.take(most) {
                    let why = rows_fail(&model, &plan);
                    let what = format!("{text} of {name} in {dtype} ({quant:?}) on {device}");
                    failures.extend(why.map(|why| format!("{what}: {why}")));
                }
            }
        }
    }
    assert!(failures.is_empty(), "{} fail:\n{}", failures.len(), failures.join("\n"));
}

#[test]
fn logits_of_every_implementation_do_not_depend_on_passes_and_rows() {
    let mut failures = Vec::new();
    for (device, opened) in devices() {
        let choices: &[Choice] = match device {
            "cpu" => &[Choice::Reference],
            "wgpu" => &[Choice::Cube],
            _ => &[],
        };
        for &kernels in choices {
            let model = llama_with(opened, kernels);
            let plan = Plan::dynamic();
            let why = tokens_fail(&model, &plan, &PIECES).or_else(|| rows_fail(&model, &plan));
            failures.extend(why.map(|why| format!("{kernels} on {device}: {why}")));
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}
