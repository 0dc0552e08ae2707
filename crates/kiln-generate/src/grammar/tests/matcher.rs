//! Regular expressions, grammars, forced tokens, rewinding, clones and ends.

use super::*;

fn tokens(text: &str) -> Vec<TokenId> {
    demo().encode(text, false).unwrap()
}

fn text(ids: &[TokenId]) -> String {
    String::from_utf8(ids.iter().flat_map(|id| table().bytes(*id).to_vec()).collect()).unwrap()
}

#[test]
fn texts_that_match_are_accepted_and_others_are_not() {
    let arithmetic = "start: sum\nsum: product (\"+\" product)*\nproduct: atom (\"*\" atom)*\natom: NUMBER | \"(\" sum \")\"\nNUMBER: /[0-9]+/\n";
    let balanced = "start: \"(\" start* \")\"";
    let person = r#"{"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}},
        "required": ["a"], "additionalProperties": false}"#;
    let cases: [(Matcher, &[&str], &[&str]); 6] = [
        (regex("[a-c]+(-[0-9]{2})?"), &["a", "abc-12"], &["", "d", "abc-1", "abc-123"]),
        (regex("(yes|no|yesterday)"), &["yes", "no", "yesterday"], &["ye", "yesterdays"]),
        (regex("é|漢字|🙂"), &["é", "漢字", "🙂"], &["漢", "e"]),
        (lark(arithmetic), &["1", "12*(3+4)", "((7))"], &["", "1+", "(1", "1 + 2"]),
        (lark(balanced), &["()", "(()(()))"], &["(", "())", ""]),
        (
            schema(person),
            &["{\"a\":1}", "{ \"a\" : 1 ,\n \"b\": true }"],
            &[
                "{}",
                "{\"b\": true, \"a\": 1}",
                "{\"a\": 1.5}",
                "{\"a\": 1, \"c\": 2}",
                "{\"a\": 1} ",
                " {\"a\": 1}",
            ],
        ),
    ];
    for (row, good, bad) in cases {
        for text in good {
            assert!(accepts(row.clone(), text), "{text} is not accepted");
        }
        for text in bad {
            assert!(!accepts(row.clone(), text), "{text} is accepted");
        }
    }
}

#[test]
fn whitespace_can_be_forbidden() {
    let schema = |options: &str| {
        schema(&format!(
            r#"{{"properties": {{"a": {{"const": 1}}}}, "required": ["a"], "type": "object", "additionalProperties": false {options}}}"#
        ))
    };
    assert!(accepts(schema(""), "{\"a\": 1}"));
    let compact = schema(r#", "x-guidance": {"whitespace_flexible": false}"#);
    assert!(accepts(compact.clone(), "{\"a\":1}"));
    assert!(!accepts(compact, "{\"a\": 1}"));
}

#[test]
fn json_object_accepts_objects_only() {
    let any = Grammar::json_object().compile(&table()).unwrap();
    assert_eq!(any.name(), "json_schema");
    assert!(accepts(any.clone(), "{\"a\": [1, null, {\"b\": \"c\"}]}"));
    assert!(!accepts(any, "[1]"));
}

#[test]
fn forced_tokens_are_those_of_the_tokenizer_and_the_only_allowed_ones() {
    let mut row = regex("The little dog( ran| sat) away\\.");
    let forced = row.forced().unwrap();
    assert!(!forced.is_empty());
    assert!("The little dog".starts_with(&text(&forced)), "{}", text(&forced));
    assert!(tokens("The little dog").starts_with(&forced));
    for id in &forced {
        // The mask contains one token, and the rest is still forced.
        assert_eq!(row.mask().unwrap().tokens().collect::<Vec<_>>(), [*id]);
        row.accept(*id).unwrap();
    }
    assert!(row.peek().unwrap().forced.is_empty());
    assert!(row.peek().unwrap().mask.count() > 1);
    let rest = "The little dog sat away.".strip_prefix(&text(&forced)).unwrap();
    tokens(rest).iter().for_each(|id| row.accept(*id).unwrap());
    assert!(row.must_end());
    assert!(row.forced().unwrap().is_empty());
}

#[test]
fn long_forced_text_is_given_in_pieces() {
    let long = "once there was a cat ".repeat(200);
    let mut row = regex(&long);
    let (mut said, mut steps) = (Vec::new(), 0);
    while !row.must_end() {
        let forced = row.peek().unwrap().forced;
        assert!(!forced.is_empty());
        forced.iter().for_each(|id| row.accept(*id).unwrap());
        said.extend(forced);
        steps += 1;
    }
    assert_eq!(text(&said), long);
    assert_eq!(said, tokens(&long));
    assert!(steps < 20, "{steps}");
}

#[test]
fn an_end_token_is_allowed_only_after_a_complete_text() {
    let mut row = regex("ab?");
    assert!(!row.may_end().unwrap() && !row.mask().unwrap().allows(EOS));
    row.accept(EOS).unwrap_err();
    row.accept(tokens("a")[0]).unwrap();
    let next = row.peek().unwrap();
    assert!(next.may_end && !next.must_end && next.mask.allows(EOS) && next.mask.count() == 2);
    let mut longer = row.clone();
    longer.accept(tokens("b")[0]).unwrap();
    let next = longer.peek().unwrap();
    assert!(next.may_end && next.must_end && next.mask.tokens().collect::<Vec<_>>() == [EOS]);
    for mut row in [row, longer] {
        row.accept(EOS).unwrap();
        let next = row.peek().unwrap();
        assert!(next.must_end && next.forced.is_empty() && next.mask.allows(EOS));
        row.accept(EOS).unwrap_err();
        row.accept(tokens("b")[0]).unwrap_err();
    }
    // Only the empty text matches.
    assert!(regex("").peek().unwrap().must_end);
}

#[test]
fn any_end_token_may_end_a_text() {
    let both = Arc::new(TokenTable::new(demo(), 2048, &[EOS, 2]).unwrap());
    let mut row = Grammar::regex("a|aa").unwrap().compile(&both).unwrap();
    row.accept(tokens("a")[0]).unwrap();
    let mask = row.mask().unwrap();
    assert!(mask.allows(EOS) && mask.allows(2) && !mask.allows(0));
    row.accept(2).unwrap();
    assert!(row.must_end());

    let none = Arc::new(TokenTable::new(demo(), 2048, &[]).unwrap());
    let mut row = Grammar::regex("ab").unwrap().compile(&none).unwrap();
    tokens("ab").iter().for_each(|id| row.accept(*id).unwrap());
    let next = row.peek().unwrap();
    assert!(next.must_end && next.may_end && next.mask.count() == 0);
}

#[test]
fn rewind_restores_earlier_masks() {
    let grammar = r#"{"type": "array", "items": {"enum": ["cat", "dog", 12]}, "minItems": 2}"#;
    let mut random = random(7);
    for _ in 0..20 {
        let mut row = schema(grammar);
        let mut masks = vec![row.peek().unwrap()];
        for _ in 0..12 {
            let next = masks.last().unwrap();
            let allowed: Vec<TokenId> = next.mask.tokens().collect();
            row.accept(one(&allowed, &mut random)).unwrap();
            masks.push(row.peek().unwrap());
            if masks.last().unwrap().must_end {
                break;
            }
        }
        while row.accepted() > 0 {
            let back = 1 + random.next_u32() as usize % row.accepted();
            row.rewind(back).unwrap();
            let (now, then) = (row.peek().unwrap(), &masks[row.accepted()]);
            assert_eq!((now.mask, now.forced), (then.mask.clone(), then.forced.clone()));
            assert_eq!((now.may_end, now.must_end), (then.may_end, then.must_end));
        }
        row.rewind(0).unwrap();
        assert!(row.rewind(1).unwrap_err().to_string().contains("were accepted"));
    }
    let mut stops = lark("start: word \".\"\nword[stop=\" \"]: /[a-z]+/");
    assert!(!stops.can_rewind());
    stops.accept(tokens("a")[0]).unwrap();
    assert!(stops.rewind(1).unwrap_err().to_string().contains("cannot take back"));
    // The text continues.
    stops.accept(tokens("a")[0]).unwrap();
}

#[test]
fn clones_advance_independently() {
    let mut one = regex("(cat|dog)s?");
    let mut other = one.clone();
    tokens("cat").iter().for_each(|id| one.accept(*id).unwrap());
    tokens("dog").iter().for_each(|id| other.accept(*id).unwrap());
    let (a, b) = (one.peek().unwrap(), other.peek().unwrap());
    assert_eq!(a.mask, b.mask);
    assert!(a.may_end && one.accepted() > 0);
    one.rewind(one.accepted()).unwrap();
    assert!(!one.may_end().unwrap() && other.may_end().unwrap());
}

#[test]
fn a_forbidden_token_is_an_error_and_changes_nothing() {
    let mut row = regex("[0-9]{3}");
    let before = row.peek().unwrap();
    for id in [0, 2, 2047, 5000, TokenId::MAX, tokens("x")[0]] {
        let error = row.accept(id).unwrap_err().to_string();
        assert_eq!(error, format!("regex: token {id} may not follow after 0 tokens of a text"));
    }
    assert_eq!(row.peek().unwrap().mask, before.mask);
    assert_eq!(row.accepted(), 0);
}

#[test]
fn special_tokens_are_allowed_where_a_grammar_names_them() {
    let mut row = lark("start: \"a\" <pad> \"b\"");
    tokens("a").iter().for_each(|id| row.accept(*id).unwrap());
    assert_eq!(row.mask().unwrap().tokens().collect::<Vec<_>>(), [2]);
    row.accept(2).unwrap();
    row.accept(tokens("b")[0]).unwrap();
    assert!(row.must_end());
    row.rewind(2).unwrap();
    assert!(row.mask().unwrap().allows(2));
}

#[test]
fn a_mask_removes_scores_and_counts_the_remaining_ones() {
    let mut row = regex("[ab]");
    let mask = row.mask().unwrap();
    let (a, b) = (tokens("a")[0] as usize, tokens("b")[0] as usize);
    let mut scores = vec![1.0; 2048];
    assert_eq!(mask.apply(&mut scores), 2);
    assert!(scores.iter().enumerate().all(|(id, score)| (*score == 1.0) == (id == a || id == b)));
    let mut scores = vec![1.0; 2048];
    scores[a] = f32::NEG_INFINITY;
    scores[b] = f32::NEG_INFINITY;
    assert_eq!(mask.apply(&mut scores), 0);
    assert_eq!(mask.words().len(), 64);
    assert_eq!(mask.words()[a / 32] >> (a % 32) & 1, 1);
}
