//! Mutations of command line words: of the parts between punctuation.

use super::Random;

const PIECES: [&str; 36] = [
    "",
    "0",
    "1",
    "-1",
    "2",
    "16",
    "+1",
    "4294967296",
    "4294967297",
    "9223372036854775808",
    "18446744073709551615",
    "18446744073709551616",
    "1e5",
    "1e-40",
    "1e400",
    "NaN",
    "inf",
    "0x10",
    ".",
    "1.5",
    " ",
    "\t",
    "\0",
    "\x1b[31m",
    "é",
    "🙂",
    "١",
    "all",
    "layers",
    "auto",
    ":",
    ",",
    "=",
    " + ",
    "GiB",
    "::",
];

pub(super) fn tokens(text: &str) -> Vec<String> {
    let mut tokens = vec![String::new()];
    for c in text.chars() {
        if ":,=+ ".contains(c) {
            tokens.extend([c.to_string(), String::new()]);
        } else if let Some(last) = tokens.last_mut() {
            last.push(c);
        }
    }
    tokens
}

pub(super) fn mutated(text: &str, others: &[String], random: &mut Random) -> String {
    let mut tokens = tokens(text);
    for _ in 0..random.rounds() {
        let (at, to) = (random.below(tokens.len()), random.below(tokens.len()));
        let other = others.get(random.below(others.len())).cloned().unwrap_or_default();
        match random.below(7) {
            0 | 1 if !tokens.is_empty() => tokens[at] = random.pick(&PIECES).to_owned(),
            2 if !tokens.is_empty() => tokens[at] = other,
            3 => tokens.insert(at, other),
            4 if !tokens.is_empty() => drop(tokens.remove(at)),
            5 if !tokens.is_empty() => tokens.insert(to, tokens[at].clone()),
            _ => tokens.extend([",".to_owned(), other, "=".to_owned(), random.pick(&PIECES).to_owned()]),
        }
    }
    if random.one_in(50) { tokens.concat().repeat(1000) } else { tokens.concat() }
}
