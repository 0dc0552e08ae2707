//! A validator accepts the texts that masks lead to.

use serde::Deserialize;
use serde_json::Value;

use super::*;

#[derive(Deserialize)]
struct Case {
    name: String,
    schema: Value,
}

/// Number of tokens after which a walk heads for the end, and its maximum length.
const WANDERS: usize = 40;
const MOST: usize = 400;

/// A text of random allowed tokens; `None` if it does not end within [`MOST`] tokens.
pub(super) fn walk(mut row: Matcher, random: &mut ChaCha8Rng) -> Option<String> {
    let table = table();
    let (mut ids, mut text) = (Vec::new(), Vec::new());
    while ids.len() < MOST {
        let next = row.peek().unwrap();
        assert_eq!(next.mask.allows(EOS), next.may_end);
        let allowed: Vec<TokenId> = next.mask.tokens().collect();
        let ends = ids.len() > WANDERS || random.next_u32().is_multiple_of(3);
        let id = if ends { toward_the_end(&allowed, &text, random) } else { one(&allowed, random) };
        if next.must_end {
            assert_eq!(allowed, [EOS]);
        }
        // A token that is not allowed is rejected, and changes nothing.
        let other = random.next_u32() % 2048;
        if !next.mask.allows(other) && next.forced.is_empty() {
            row.accept(other).unwrap_err();
        }
        row.accept(id).unwrap();
        if id == EOS {
            let text = String::from_utf8(text).unwrap();
            assert_eq!(demo().decode(&ids, false).unwrap(), text);
            return Some(text);
        }
        ids.push(id);
        text.extend_from_slice(table.bytes(id));
    }
    None
}

/// A token that ends the text or a part of it, if there is one, and else one that begins no new part.
fn toward_the_end(allowed: &[TokenId], text: &[u8], random: &mut ChaCha8Rng) -> TokenId {
    let table = table();
    let first = |id: TokenId| table.bytes(id).first().copied().unwrap_or_default();
    let has = |id: TokenId, what: &[u8]| table.bytes(id).iter().any(|byte| what.contains(byte));
    let in_string: [&dyn Fn(TokenId) -> bool; 3] =
        [&|id| first(id) == b'"', &|id| has(id, b"@:ab/z") && !has(id, b"\\"), &|id| !has(id, b"\\")];
    let outside: [&dyn Fn(TokenId) -> bool; 5] = [
        &|id| id == EOS,
        &|id| b"]}".contains(&first(id)),
        &|id| first(id) == b'"',
        &|id| b"123456789tfn,:".contains(&first(id)),
        &|id| !b"[{ \n\r\t".contains(&first(id)),
    ];
    let kinds = if within_string(text) { &in_string[..] } else { &outside[..] };
    let some = |is: &&dyn Fn(TokenId) -> bool| {
        let some: Vec<TokenId> = allowed.iter().copied().filter(|id| is(*id)).collect();
        (!some.is_empty()).then_some(some)
    };
    one(&kinds.iter().find_map(some).unwrap_or_else(|| allowed.to_vec()), random)
}

/// Whether JSON that begins with `text` continues within a string.
fn within_string(text: &[u8]) -> bool {
    let (mut within, mut escaped) = (false, false);
    for byte in text {
        within ^= *byte == b'"' && !escaped;
        escaped = *byte == b'\\' && !escaped;
    }
    within
}

fn cases() -> Vec<Case> {
    serde_json::from_slice(&read("tests/data/json_schemas.json")).unwrap()
}

#[test]
fn every_complete_text_is_valid_against_its_schema() {
    let cases = cases();
    assert!(cases.len() >= 200);
    let (mut ended, mut endless) = (0, Vec::new());
    for (at, Case { name, schema }) in cases.iter().enumerate() {
        let grammar = Grammar::json_schema(&schema.to_string()).unwrap();
        let row = grammar.compile(&table()).unwrap_or_else(|e| panic!("{name}: {e}"));
        for seed in 0..4 {
            match walk(row.clone(), &mut random(at as u64 * 4 + seed)) {
                None => endless.push(name.as_str()),
                Some(text) => match serde_json::from_str(&text) {
                    Ok(value) => {
                        assert!(validator::valid(schema, schema, &value), "{name}: {text} is not valid");
                        ended += 1;
                    }
                    // 1e999 is JSON, but not an f64.
                    Err(e) => assert!(e.to_string().contains("number out of range"), "{name}: {text}: {e}"),
                },
            }
        }
    }
    assert!(ended > cases.len() * 4 * 9 / 10, "only {ended} texts end; these do not: {endless:?}");
}
