//! Input from strangers: each is an error of one sentence, or compiles.

use super::*;

/// The error of compiling, or else of the first mask.
fn error(grammar: Result<Grammar>) -> String {
    let compiled = grammar.and_then(|grammar| grammar.compile(&table()));
    let error = compiled.and_then(|mut row| row.peek()).expect_err("an error").to_string();
    assert!(!error.contains('\n') && error.len() < 400, "{error}");
    error
}

#[test]
fn invalid_grammars_are_errors_that_name_the_setting() {
    let json = |text: &str| error(Grammar::json_schema(text));
    let cases = [
        (json("{"), "json_schema: it is not JSON"),
        (json("3"), "json_schema: it is neither an object nor true or false"),
        (json(r#"{"type": "objekt"}"#), "json_schema: Invalid type: objekt"),
        (json(r#"{"multipleOf": 0}"#), "json_schema: multipleOf has to be above 0"),
        (json(r#"{"pattern": ["ééééééééééééééééééééééééééééééééééééééééééééééééééééé"]}"#), "json_schema: "),
        (json(r#"{"type": "string", "pattern": "a("}"#), "json_schema: unclosed group"),
        (json("false"), "json_schema: no text can match the schema"),
        (
            json(r#"{"type": "integer", "minimum": 3, "maximum": 2}"#),
            "json_schema: no text can match the schema",
        ),
        (error(Grammar::regex("a(b")), "regex: unclosed group"),
        (error(Grammar::regex("(?=a)b")), "regex: look-around"),
        (error(Grammar::regex(r"[^\s\S]")), "regex: no text can match it"),
        (error(Grammar::lark("")), "grammar: no start rule"),
        (error(Grammar::lark("start: foo\n")), "grammar: at 1(8): unknown name"),
        (error(Grammar::lark("start: <nope>\n")), "grammar: at 1(8): unknown special token"),
        (error(Grammar::lark("start: <[0-99999]>\n")), "grammar: at 1(8): Token range end too large"),
    ];
    for (error, begins) in cases {
        assert!(error.starts_with(begins), "{error} does not begin with {begins}");
    }
}

#[test]
fn unsupported_schema_keywords_are_errors_that_name_them() {
    let cases = [
        ("uniqueItems", "true"),
        ("not", "{}"),
        ("if", "{}"),
        ("contains", "{}"),
        ("minContains", "1"),
        ("maxContains", "1"),
        ("propertyNames", "{}"),
        ("dependentRequired", "{}"),
        ("dependentSchemas", "{}"),
        ("unevaluatedItems", "false"),
        ("unevaluatedProperties", "false"),
        ("$dynamicRef", "\"#x\""),
    ];
    for (keyword, value) in cases {
        let error = error(Grammar::json_schema(&format!(r#"{{"type": "array", "{keyword}": {value}}}"#)));
        assert_eq!(
            error,
            format!("json_schema: these keywords of the schema are not supported: [\"{keyword}\"]")
        );
    }
    let json = |text: &str| error(Grammar::json_schema(text));
    assert!(json(r#"{"oneOf": [{"minimum": 3}, {"maximum": 5}]}"#).contains("use anyOf"));
    assert!(
        json(r#"{"type": "string", "format": "iri"}"#).contains("format of strings is not supported: iri")
    );
    assert!(json(r#"{"$ref": "http://example.com/x"}"#).contains("outside of the schema"));
    assert!(json(r##"{"$ref": "#/$defs/x"}"##).contains("leads nowhere"));
    let counted = r#"{"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 2}"#;
    assert!(json(counted).contains("min/maxProperties only supported"));
    let overlapping = r#"{"type": "object", "patternProperties": {"a": {}, "b": {}}}"#;
    assert!(json(overlapping).contains("not disjoint"));
}

#[test]
fn grammars_that_are_too_long_or_too_deep_are_errors() {
    let long = " ".repeat(10 << 20);
    for grammar in [Grammar::json_schema(&long), Grammar::regex(&long), Grammar::lark(&long)] {
        assert!(error(grammar).contains("it has 10485760 bytes, at most 65536 are taken"));
    }
    let nested = format!("{}{{}}{}", "{\"items\": ".repeat(1000), "}".repeat(1000));
    assert!(error(Grammar::json_schema(&nested)).contains("nested more than 127 levels deep"));
    let groups = format!("{}a{}", "(".repeat(10_000), ")".repeat(10_000));
    assert!(error(Grammar::regex(&groups)).contains("nested"));
    assert!(error(Grammar::lark(&format!("start: {groups}"))).contains("too deeply nested"));
}

#[test]
fn long_chains_of_references_and_rules_are_followed() {
    let mut rules = String::from("start: a0\n");
    (0..5000).for_each(|i| rules += &format!("a{i}: a{}\n", i + 1));
    assert!(accepts(lark(&(rules + "a5000: \"x\"\n")), "x"));
    let items =
        |n: usize| format!("\"a{n}\": {{\"items\": {{\"items\": {{\"$ref\": \"#/$defs/a{}\"}}}}}}", n + 1);
    let defs: Vec<String> = (0..1000).map(items).collect();
    let chain = format!("{{\"$ref\": \"#/$defs/a0\", \"$defs\": {{{}, \"a1000\": {{}}}}}}", defs.join(","));
    assert!(accepts(schema(&chain), "[[]]"));
}

#[test]
fn grammars_that_take_too_much_work_are_errors() {
    let any_of = format!(r#"{{"anyOf": [{}]}}"#, [r#"{"required": ["a"]}"#; 9].join(","));
    let product = format!(r#"{{"allOf": [{}]}}"#, vec![any_of; 8].join(","));
    assert!(error(Grammar::json_schema(&product)).contains("combines too many alternatives"));

    let names: Vec<String> = (0..2500).map(|i| format!("\"a{i}\": {{}}")).collect();
    let properties = format!(r#"{{"properties": {{{}}}}}"#, names.join(","));
    let alternatives = vec![r#"{"type": "object"}"#; 1000].join(",");
    let copies = format!(r#"{{"properties": {{"p": {properties}}}, "anyOf": [{alternatives}]}}"#);
    assert!(error(Grammar::json_schema(&copies)).contains("anyOf and oneOf have 1000 alternatives"));

    let multiples =
        r#"{"allOf": [{"type": "integer", "multipleOf": 4294967291}, {"multipleOf": 4294967279}]}"#;
    assert!(error(Grammar::json_schema(multiples)).contains("multipleOf are too large"));

    // Each letter may end any number of parts.
    let mut ambiguous = lark("start: \"a\" start | \"a\" start start | \"a\"");
    let failed = (0..2000).find_map(|_| {
        let next = ambiguous.peek().ok()?;
        let more = next.mask.tokens().find(|id| *id != EOS);
        next.forced.iter().chain(&more).find_map(|id| ambiguous.accept(*id).err())
    });
    let failed = failed.map_or_else(|| ambiguous.peek().unwrap_err().to_string(), |error| error.to_string());
    assert_eq!(failed, "grammar: the grammar takes too much work; make it simpler");
    assert_eq!(ambiguous.peek().unwrap_err().to_string(), failed, "the error stays");
    // Texts without an end, or without a beginning.
    for endless in ["start: \"a\" start", "start: start \"a\""] {
        assert!(error(Grammar::lark(endless)).contains("no text can match it"));
    }
}

#[test]
fn a_panic_of_the_grammar_library_is_an_error() {
    let panics = || -> usize { "a panic".parse().unwrap() };
    assert!(limits::within_time(panics).unwrap_err().contains("ParseIntError"));
    let llguidance = sentence::of("panic: index out of bounds\n<backtrace>\n0: main\n</backtrace>");
    assert_eq!(llguidance, "llguidance, which compiles it, fails on it: index out of bounds");
    let long = sentence::of(&"é".repeat(1000));
    assert_eq!(long.chars().count(), 301);
}

/// Grammars of random parts do not panic, and every token that they allow is accepted.
#[test]
fn random_sources_compile_or_are_errors() {
    let parts = [
        "a",
        "[a-z]",
        "(",
        ")",
        "|",
        "*",
        "+",
        "?",
        "{2,3}",
        "{0}",
        "\\d",
        ".",
        "^",
        "$",
        "\\",
        "é",
        "start: ",
        "\n",
        "\"a\"",
        "/b/",
        "{\"type\":",
        "\"string\"",
        "}",
        "\"enum\":[1,",
        "]",
        "\"$ref\":\"#\"",
        ",",
        "{",
        "[",
        "%json ",
        "<s>",
        "~",
        "&",
    ];
    let mut random = random(11);
    let mut compiled = 0;
    for _ in 0..800 {
        let source: String = (0..1 + random.next_u32() % 8).map(|_| one(&parts, &mut random)).collect();
        let source = if random.next_u32().is_multiple_of(2) { source } else { format!("start: {source}\n") };
        for grammar in [Grammar::json_schema(&source), Grammar::regex(&source), Grammar::lark(&source)] {
            let Ok(mut row) = grammar.and_then(|grammar| grammar.compile(&table())) else { continue };
            compiled += 1;
            for _ in 0..5 {
                let Ok(next) = row.peek() else { break };
                let allowed: Vec<TokenId> = next.mask.tokens().collect();
                row.accept(one(&allowed, &mut random)).unwrap_or_else(|e| panic!("{source}: {e}"));
                if row.must_end() {
                    break;
                }
            }
        }
    }
    assert!(compiled > 80, "{compiled}");
}
