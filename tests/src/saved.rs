//! Caches on disk.

use kiln::{Error, LoadOptions, Model, ModelCache, Plan, RandomLlama, RunOptions, TokenId};

use crate::support::{TINY, batch, fixtures, floats, forward, recorded};

const PROMPT: [TokenId; 20] = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 58, 97 - 1, 79, 32, 38, 46, 26, 43, 38, 32];

const CACHES: &[&str] = &["dynamic", "fixed", "fixed:len=64", "sink:window=12,sinks=3", "none"];

fn filled(model: &Model, plan: &Plan) -> ModelCache {
    let mut cache = model.cache(plan).unwrap();
    forward(model, &batch(model, &[PROMPT.to_vec()]), &mut cache);
    cache
}

#[test]
fn a_loaded_cache_goes_on_as_if_never_saved() {
    let folder = tempfile::tempdir().unwrap();
    for (device, opened) in kiln_testkit::devices::opened() {
        let model = recorded("llama", opened);
        for text in CACHES {
            let plan = Plan::named(text).unwrap();
            let path = folder.path().join("cache.safetensors");
            let (mut saved, mut never) = (filled(&model, &plan), filled(&model, &plan));
            model.save_cache(&path, &plan, &mut saved, &[PROMPT.to_vec()], &[0]).unwrap();
            let mut loaded = model.load_cache(&path, &plan).unwrap();
            assert_eq!((loaded.tokens, loaded.left_pad), (vec![PROMPT.to_vec()], vec![0]));
            for token in [7, 8, 9] {
                let next = batch(&model, &[vec![token]]);
                let want = forward(&model, &next, &mut never);
                assert_eq!(forward(&model, &next, &mut loaded.cache), want, "{text} on {device}, loaded");
                assert_eq!(forward(&model, &next, &mut saved), want, "{text} on {device}, saved");
            }
        }
    }
}

#[test]
fn padded_rows_are_saved_too() {
    let (_, opened) = &kiln_testkit::devices::opened()[0];
    let model = recorded("llama", opened);
    let plan = Plan::named("dynamic").unwrap();
    let rows = vec![vec![5, 6, 7], vec![9, 8, 7, 6, 5]];
    let padded = kiln::Batch::left_padded(&rows, 0, model.device()).unwrap();
    let mut cache = model.cache(&plan).unwrap();
    model.causal().forward(&padded, kiln::Logits::Last, &mut cache).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("cache.safetensors");
    model.save_cache(&path, &plan, &mut cache, &rows, &[2, 0]).unwrap();
    let mut loaded = model.load_cache(&path, &plan).unwrap();
    assert_eq!((loaded.tokens, loaded.left_pad.clone()), (rows, vec![2, 0]));
    let mut next = batch(&model, &[vec![1], vec![2]]);
    next.left_pad = loaded.left_pad;
    let run = |cache| floats(model.causal().forward(&next, kiln::Logits::Last, cache).unwrap());
    assert_eq!(run(&mut loaded.cache), run(&mut cache));
}

/// Every kind of damage, and every mismatch, is one sentence.
#[test]
fn what_does_not_belong_together_is_refused() {
    let (_, opened) = &kiln_testkit::devices::opened()[0];
    let model = recorded("llama", opened);
    let plan = Plan::named("dynamic").unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("cache.safetensors");
    let mut cache = filled(&model, &plan);
    model.save_cache(&path, &plan, &mut cache, &[PROMPT.to_vec()], &[0]).unwrap();
    let whole = std::fs::read(&path).unwrap();

    let refused = |model: &Model, plan: &str, bytes: &[u8]| {
        std::fs::write(&path, bytes).unwrap();
        match model.load_cache(&path, &Plan::named(plan).unwrap()) {
            Err(Error::File { why, .. }) => why,
            Err(other) => panic!("{other}"),
            Ok(_) => panic!("was taken"),
        }
    };
    let other = recorded("llama_tied", opened);
    assert!(refused(&other, "dynamic", &whole).contains("another model"));
    assert!(refused(&model, "sink:window=12,sinks=3", &whole).contains("`dynamic`"));
    assert!(refused(&model, "dynamic", &whole[..whole.len() - 1]).contains("not a whole cache file"));
    assert!(refused(&model, "dynamic", &[]).contains("not a whole cache file"));
    assert!(refused(&model, "dynamic", b"hello, this is no such file at all").contains("not a whole"));
    // A weights file is a safetensors file too.
    let weights = std::fs::read(fixtures("5.23.0").join("models/llama/model.safetensors")).unwrap();
    assert!(refused(&model, "dynamic", &weights).contains("not a cache"));
    // A bit anywhere. Places that hold nothing but spaces of the header may be changed without harm.
    for at in (0..whole.len()).step_by(97) {
        let mut flipped = whole.clone();
        flipped[at] ^= 4;
        std::fs::write(&path, &flipped).unwrap();
        if let Ok(mut loaded) = model.load_cache(&path, &plan) {
            let next = batch(&model, &[vec![1]]);
            let mut whole = filled(&model, &plan);
            let want = forward(&model, &next, &mut whole);
            assert_eq!(forward(&model, &next, &mut loaded.cache), want, "a flipped bit at {at} was taken");
        }
    }
    // Too small for what was saved.
    let fixed = Plan::named("fixed:len=64").unwrap();
    let mut cache = filled(&model, &fixed);
    model.save_cache(&path, &fixed, &mut cache, &[PROMPT.to_vec()], &[0]).unwrap();
    let bytes = std::fs::read(&path).unwrap();
    assert!(refused(&model, "fixed:len=8", &bytes).contains("`fixed:len=64`"));
}

#[test]
fn a_model_of_no_folder_saves_nothing() {
    let (_, opened) = &kiln_testkit::devices::opened()[0];
    let model = Model::random(&RandomLlama { ..TINY }, LoadOptions::float32(opened.clone())).unwrap();
    let plan = Plan::named("dynamic").unwrap();
    let mut cache = filled(&model, &plan);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("cache.safetensors");
    let error = model.save_cache(&path, &plan, &mut cache, &[PROMPT.to_vec()], &[0]).unwrap_err();
    assert!(error.to_string().contains("made up"), "{error}");
    assert!(!path.exists());
    // Nothing is lost where a file cannot be written.
    let model = recorded("llama", opened);
    let mut cache = filled(&model, &plan);
    let nowhere = folder.path().join("no/such/folder/cache.safetensors");
    assert!(model.save_cache(&nowhere, &plan, &mut cache, &[PROMPT.to_vec()], &[0]).is_err());
    assert_eq!(cache.seq_len(), PROMPT.len());
    let steps = model.generate(&mut cache, vec![vec![1]], &Default::default(), RunOptions::default());
    assert!(steps.is_ok());
}
