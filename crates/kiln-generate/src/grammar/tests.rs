#![allow(clippy::unwrap_used, clippy::panic, reason = "these are tests")]

use std::{fs, path::Path, sync::LazyLock};

use kiln_core::model::TokenId;
use rand_chacha::{
    ChaCha8Rng,
    rand_core::{Rng, SeedableRng},
};

use super::*;
use crate::Tokenizer;

mod answers;
mod dead_ends;
mod hostile;
mod masks;
mod matcher;
mod schemas;
mod table;
mod validator;

/// The end-of-text token in the vocabulary of the demo model.
const EOS: TokenId = 1;

fn read(path: &str) -> Vec<u8> {
    fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)).unwrap()
}

fn demo() -> Arc<Tokenizer> {
    static DEMO: LazyLock<Arc<Tokenizer>> =
        LazyLock::new(|| Arc::new(Tokenizer::load(&read("assets/demo/tokenizer.json")).unwrap()));
    DEMO.clone()
}

/// The table of the demo model, which has 2048 tokens.
fn table() -> Arc<TokenTable> {
    static TABLE: LazyLock<Arc<TokenTable>> =
        LazyLock::new(|| Arc::new(TokenTable::new(demo(), 2048, &[EOS]).unwrap()));
    TABLE.clone()
}

fn schema(text: &str) -> Matcher {
    Grammar::json_schema(text).unwrap().compile(&table()).unwrap()
}

fn regex(text: &str) -> Matcher {
    Grammar::regex(text).unwrap().compile(&table()).unwrap()
}

fn lark(text: &str) -> Matcher {
    Grammar::lark(text).unwrap().compile(&table()).unwrap()
}

/// Whether the text matches, and ends there. It is accepted byte by byte, however the tokenizer would split
/// it.
fn accepts(mut row: Matcher, text: &str) -> bool {
    let mut takes = |byte: u8| {
        let id = (0..2048).find(|id| table().bytes(*id) == [byte]).unwrap();
        row.accept(id).is_ok()
    };
    text.bytes().all(&mut takes) && row.peek().unwrap().mask.allows(EOS)
}

fn random(seed: u64) -> ChaCha8Rng {
    ChaCha8Rng::seed_from_u64(seed)
}

fn one<T: Copy>(of: &[T], random: &mut ChaCha8Rng) -> T {
    of[random.next_u32() as usize % of.len()]
}
