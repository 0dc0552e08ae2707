//! Masks from the thread equal those of the rows themselves.

use std::{
    thread,
    time::{Duration, Instant},
};

use super::*;

fn same(a: &Next, b: &Next) -> bool {
    (&a.mask, &a.forced, a.may_end, a.must_end) == (&b.mask, &b.forced, b.may_end, b.must_end)
}

fn rows() -> Vec<Matcher> {
    vec![
        regex("[a-z]+( [a-z]+)*"),
        regex("[0-9]{2,9}"),
        schema(r#"{"type": "array", "items": {"type": "integer"}}"#),
    ]
}

#[test]
fn masks_equal_those_that_each_row_computes() {
    let mut alone = rows();
    let mut masks = Masks::new(rows()).unwrap();
    let mut random = random(3);
    for _ in 0..20 {
        let nexts = masks.wait().unwrap();
        let mut step = Vec::new();
        for (row, (next, alone)) in nexts.iter().zip(&mut alone).enumerate() {
            let [next] = &next[..] else { panic!("one position") };
            assert!(same(next, &alone.peek().unwrap()));
            let allowed: Vec<TokenId> = next.mask.tokens().filter(|id| *id != EOS).collect();
            // A row that has ended waits.
            step.push(match allowed.is_empty() {
                true => Advance { parent: row, ..Advance::default() },
                false => Advance::token(row, one(&allowed, &mut random)),
            });
            step[row].tokens.iter().for_each(|id| alone.accept(*id).unwrap());
        }
        masks.advance(step).unwrap();
    }
    assert_eq!(masks.rows(), 3);
}

#[test]
fn masks_follow_the_parents_of_beams() {
    let ids = |text: &str| demo().encode(text, false).unwrap();
    let mut masks = Masks::new(vec![regex("(cat|dog)s{3}"); 2]).unwrap();
    masks.wait().unwrap();
    let step = |parent, text: &str| Advance { parent, tokens: ids(text), ..Advance::default() };
    masks.advance(vec![step(0, "cat"), step(1, "dog")]).unwrap();
    // There are three rows now: two that continue the second, and one that rewinds its token first.
    let back = Advance { rewind: ids("dog").len(), ..step(1, "cat") };
    masks.advance(vec![step(1, "s"), step(1, ""), back]).unwrap();
    assert_eq!(masks.wait().unwrap().len(), 2);
    let nexts = masks.wait().unwrap();
    let mut alone = [regex("(cat|dog)s{3}"), regex("(cat|dog)s{3}"), regex("(cat|dog)s{3}")];
    for (row, text) in alone.iter_mut().zip(["dogs", "dog", "cat"]) {
        text.bytes().for_each(|byte| row.accept(ids(&char::from(byte).to_string())[0]).unwrap());
    }
    for (next, alone) in nexts.iter().zip(&mut alone) {
        assert_eq!(next[0].mask, alone.peek().unwrap().mask);
    }
    assert_eq!(masks.rows(), 3);
}

#[test]
fn drafts_are_checked_without_advancing_the_row() {
    let id = |text: &str| demo().encode(text, false).unwrap()[0];
    let mut masks = Masks::new(vec![regex("[ab]{4}c?")]).unwrap();
    masks.wait().unwrap();
    let draft = |tokens: &[TokenId], draft: &[TokenId]| {
        vec![Advance { tokens: tokens.to_vec(), draft: draft.to_vec(), ..Advance::default() }]
    };
    masks.advance(draft(&[id("a")], &[id("b"), id("x"), id("b")])).unwrap();
    let nexts = masks.wait().unwrap();
    // After the token and after the first token of the draft; the second may not follow.
    assert_eq!(nexts[0].len(), 2);
    assert!(!nexts[0][1].mask.allows(id("x")));
    // The row has not moved: three more letters follow, and then the end.
    masks.advance(draft(&[], &[id("b"), id("b"), id("b"), EOS])).unwrap();
    let nexts = masks.wait().unwrap();
    assert_eq!(nexts[0].len(), 5);
    assert!(nexts[0][3].may_end && !nexts[0][2].may_end && nexts[0][4].must_end);
}

#[test]
fn an_invalid_token_is_a_permanent_error() {
    let mut masks = Masks::new(vec![regex("[ab]{4}")]).unwrap();
    masks.wait().unwrap();
    assert!(masks.wait().unwrap_err().to_string().contains("no masks are being computed"));
    assert!(matches!(masks.advance(vec![Advance::token(1, 5)]), Err(Error::NoSuchRow { row: 1, rows: 1 })));
    masks.advance(vec![Advance::token(0, EOS)]).unwrap();
    assert!(masks.wait().unwrap_err().to_string().starts_with("regex: token 1 may not follow"));
    assert!(masks.advance(vec![Advance::token(0, EOS)]).is_err());
}

#[test]
fn dropping_the_masks_ends_their_thread() {
    let table = Arc::new(TokenTable::new(demo(), 2048, &[EOS]).unwrap());
    let row = Grammar::regex("[ab]*").unwrap().compile(&table).unwrap();
    let masks = Masks::new(vec![row]).unwrap();
    assert!(Arc::strong_count(&table) > 1);
    drop(masks);
    // The rows of the thread hold the table.
    for _ in 0..500 {
        if Arc::strong_count(&table) == 1 {
            return;
        }
        thread::sleep(Duration::from_millis(10));
    }
    panic!("the thread still holds its rows");
}

#[test]
fn masks_that_take_too_long_are_errors_and_end_the_thread() {
    let table = Arc::new(TokenTable::new(demo(), 2048, &[EOS]).unwrap());
    // Each letter doubles as a part of every text before it.
    let mut row = Grammar::lark("start: start start | \"a\"").unwrap().compile(&table).unwrap();
    let id = demo().encode("a", false).unwrap()[0];
    (0..150).for_each(|_| row.accept(id).unwrap());
    let begun = Instant::now();
    row.clone().peek().unwrap();
    let alone = begun.elapsed();

    let mut masks = Masks::new(vec![row; 1000]).unwrap();
    masks.time = Duration::ZERO;
    let begun = Instant::now();
    assert!(masks.wait().unwrap_err().to_string().contains("take longer than 0 s"));
    assert!(masks.wait().is_err() && masks.advance(Vec::new()).is_err());
    // The thread gives up and drops its rows.
    while Arc::strong_count(&table) > 1 {
        assert!(begun.elapsed() < alone * 500, "the thread goes on; a row takes {alone:?}");
        thread::sleep(Duration::from_millis(1));
    }
}
