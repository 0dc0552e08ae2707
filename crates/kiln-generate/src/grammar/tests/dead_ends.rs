//! Accepted schemas lead to no place where nothing may follow.

use super::{schemas::walk, *};

/// Generates texts of random tokens, each of which can be completed, and some of which are.
fn completes(text: &str) {
    let schema: Value = serde_json::from_str(text).unwrap();
    let row = Grammar::json_schema(text).unwrap().compile(&table()).unwrap();
    let texts: Vec<String> = (0..30).filter_map(|seed| walk(row.clone(), &mut random(seed))).collect();
    assert!(!texts.is_empty(), "{text}");
    for made in texts {
        let value: Value = serde_json::from_str(&made).unwrap();
        assert!(validator::valid(&schema, &schema, &value), "{text}: {made}");
    }
}

#[test]
fn schemas_whose_patterns_match_named_properties_can_be_completed() {
    for text in [
        r#"{"type": "object", "properties": {"score": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["score"],
            "patternProperties": {"^score$": {"type": "integer"}}, "additionalProperties": false}"#,
        r#"{"type": "object", "properties": {"a": {}, "b": {"minimum": 3}}, "patternProperties": {"^(a|b)$": {"type": "integer"}},
            "additionalProperties": false}"#,
        r#"{"type": "object", "properties": {"b": {"type": "null"}}, "required": ["a"], "patternProperties": {"^a$": {"type": "boolean"}},
            "additionalProperties": false}"#,
        r#"{"type": "object", "properties": {"a": {"type": "boolean"}}, "patternProperties": {"^a$": {"const": true}, "^x": {"type": "null"}},
            "additionalProperties": false}"#,
        r##"{"type": "array", "minItems": 1, "maxItems": 2, "items": {"$ref": "#/$defs/x"},
            "$defs": {"x": {"type": "object", "properties": {"a": {}}, "patternProperties": {"^a$": {"type": "null"}},
            "additionalProperties": false}}}"##,
        // Names that other names matched by the pattern contain.
        r#"{"type": "object", "properties": {"a": {"type": "null"}}, "patternProperties": {"^a": {"type": "null"}}, "additionalProperties": false}"#,
        r#"{"type": "object", "patternProperties": {".*": {"type": "null"}}}"#,
        r#"{"type": "object", "properties": {"a": {"type": "null"}}, "patternProperties": {"": {"type": "null"}}, "required": ["a"]}"#,
    ] {
        completes(text);
    }
}

#[test]
fn a_schema_that_no_text_can_match_is_an_error() {
    let refused = |text: &str, why: &str| {
        let error = Grammar::json_schema(text).unwrap().compile(&table()).unwrap_err().to_string();
        assert!(error.contains(why) && error.len() < 400, "{error}");
    };
    // The names of one part are the pattern of the other.
    refused(
        r#"{"allOf": [{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
            {"type": "object", "patternProperties": {"^a$": {"type": "integer"}}, "additionalProperties": false}]}"#,
        "`patternProperties`",
    );
    refused(
        r##"{"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}"##,
        "no text can match it",
    );
    refused(
        r##"{"type": "object", "properties": {"a": {"$ref": "#/$defs/x"}}, "additionalProperties": false,
            "$defs": {"x": {"type": "array", "items": {"$ref": "#/$defs/x"}, "minItems": 1}}}"##,
        "a `$ref` without end",
    );
}

/// Custom grammars are rejected if they match nothing at all.
#[test]
fn a_grammar_that_matches_nothing_is_an_error() {
    for (grammar, why) in [
        (Grammar::regex(r"a[^\s\S]"), "regex: no text can match it"),
        (Grammar::lark("start: \"a\" start\n"), "grammar: no text can match it"),
    ] {
        let error = grammar.unwrap().compile(&table()).unwrap_err().to_string();
        assert!(error.starts_with(why), "{error}");
    }
}
