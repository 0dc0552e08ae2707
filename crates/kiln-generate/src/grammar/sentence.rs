//! The errors of llguidance, as one sentence each.

/// The error if no token may follow.
pub(super) const NO_TOKEN: &str = "no token of the vocabulary may follow the text so far";
/// Maximum length of a sentence in characters.
const MOST: usize = 300;

/// Beginnings of llguidance's messages, and their replacements. The text after the beginning is kept.
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

/// Converts an error of llguidance, which may have many lines, into one sentence.
pub(super) fn of(error: &str) -> String {
    // States, grammars and backtraces follow in tags.
    let error = ["\n<backtrace>", "\n<state>", "\n<non-verbose/>"]
        .into_iter()
        .fold(error, |error, tag| error.split(tag).next().unwrap_or_default());
    // The regex parser draws its input before it states the error.
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
