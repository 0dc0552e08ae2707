//! The errors of llguidance, as one sentence each.

/// What may follow has no token.
pub(super) const NO_TOKEN: &str = "no token of the vocabulary may follow the text so far";
/// Characters of a sentence.
const MOST: usize = 300;

/// What llguidance calls something, and what to say instead. The text behind the name follows.
const SAID: [(&str, &str); 15] = [
    ("Unimplemented keys: ", "these keywords of the schema are not supported: "),
    (
        "oneOf constraints are not supported",
        "an oneOf has alternatives that may match the same text, which is not supported; use anyOf",
    ),
    ("Unsatisfiable schema: ", "no text can match the schema: "),
    ("Unknown format: ", "this format of strings is not supported: "),
    ("Default retriever does not fetch", "a $ref leads outside of the schema"),
    ("Pointer ", "a $ref leads nowhere: "),
    ("invalid multiple of", "multipleOf has to be above 0"),
    ("schema too large", "the schema combines too many alternatives; make it simpler"),
    ("NoExtensionBias", NO_TOKEN),
    ("LexerTooComplex", TOO_MUCH),
    ("ParserTooComplex", TOO_MUCH),
    ("lexer error: ", TOO_MUCH),
    ("Too many items", TOO_MUCH),
    ("Current row has ", TOO_MUCH),
    ("panic: ", "llguidance, which compiles it, fails on it: "),
];
const TOO_MUCH: &str = "the grammar takes too much work; make it simpler";

/// One sentence for what llguidance says, which may be many lines.
pub(super) fn of(error: &str) -> String {
    // States, grammars and backtraces follow in tags.
    let error = ["\n<backtrace>", "\n<state>", "\n<non-verbose/>"]
        .into_iter()
        .fold(error, |error, tag| error.split(tag).next().unwrap_or_default());
    // The regex parser draws its input, and then says what is wrong.
    let said = error.lines().find_map(|line| line.strip_prefix("error: "));
    let line = said.or_else(|| error.lines().next()).unwrap_or_default();
    let ours = SAID.iter().find_map(|(name, ours)| {
        let (_, behind) = line.split_once(name)?;
        Some(if ours.ends_with(": ") { format!("{ours}{behind}") } else { (*ours).to_owned() })
    });
    let mut sentence = ours.unwrap_or_else(|| line.trim().to_owned());
    if let Some((end, _)) = sentence.char_indices().nth(MOST) {
        sentence.truncate(end);
        sentence.push('…');
    }
    sentence
}
