//! Rewriting of a template for minijinja: white space around tags is resolved, text becomes expressions, so
//! that it is counted like them, and expressions in tags are rewritten.

use super::{meter::wrong, respelling::Respelling};

type Made<T> = Result<T, minijinja::Error>;

/// Maximum size of a tag in bytes, without quoted texts; the longest known one has 276. The engine recurses
/// for each operator.
const TAG: usize = 4096;
/// Maximum number of `{% elif %}`s, for each of which the engine recurses.
const ALTERNATIVES: usize = 500;

/// Rewrites `source` as Jinja reads it with the settings of transformers (`trim_blocks`, `lstrip_blocks`),
/// for an engine without settings. Line numbers stay the same, so that errors name the right line.
///
/// # Errors
/// For tags that do not end, are too long, or have invalid contents, each with its line.
pub(super) fn respelled(source: &str) -> Made<String> {
    let source = source.replace("\r\n", "\n").replace('\r', "\n");
    let mut out = Rewritten { text: String::with_capacity(2 * source.len()), lines: 0 };
    let mut rest = source.strip_suffix('\n').unwrap_or(&source);
    let whole = rest;
    let (mut line, mut counted, mut alternatives) = (0, 0, 0);
    loop {
        let before = (whole.len() - rest.len()).checked_sub(1).and_then(|at| whole.as_bytes().get(at));
        let (text, tag) = rest.split_at(next_tag(rest));
        out.text(until(text, tag, before.is_none_or(|byte| *byte == b'\n')));
        if tag.is_empty() {
            return Ok(out.text);
        }
        let at = whole.len() - tag.len();
        line += lines(whole.get(counted..at).unwrap_or_default());
        counted = at;
        let at_line = |error: minijinja::Error| {
            wrong(format!("{} (line {})", error.detail().unwrap_or_default(), line + 1))
        };
        let (tokens, len) = tokens(tag).map_err(at_line)?;
        let (tag, after) = tag.split_at(len);
        match tokens.as_slice() {
            ["raw"] => {
                let after = if tag.ends_with("-%}") { after.trim_start() } else { after };
                let (text, end, after) = raw(after).ok_or_else(|| at_line(wrong("`raw` does not end")))?;
                out.text(until(text, end, false));
                rest = behind(end, after);
                continue;
            }
            ["elif", ..] => alternatives += 1,
            _ => {}
        }
        if alternatives > ALTERNATIVES {
            return Err(wrong(format!("it has more than {ALTERNATIVES} elifs")));
        }
        if !tag.starts_with("{#") {
            let is_statement = tag.starts_with("{%");
            let respelled = Respelling::new(tokens).tag(is_statement).map_err(at_line)?;
            out.tag(&respelled, is_statement, line);
        }
        rest = behind(tag, after);
    }
}

/// The output so far.
struct Rewritten {
    text: String,
    /// Number of line ends in the output.
    lines: usize,
}

impl Rewritten {
    fn text(&mut self, text: &str) {
        if !text.is_empty() {
            let quoted = text.replace('\\', "\\\\").replace('"', "\\\"");
            self.text.extend(["{{\"", &quoted, "\"}}"]);
            self.lines += lines(text);
        }
    }

    /// Writes a tag that was in `line`.
    fn tag(&mut self, content: &str, is_statement: bool, line: usize) {
        let (open, close) = if is_statement { ("{% ", " %}") } else { ("{{ ", " }}") };
        self.text.push_str(open);
        self.text.extend(std::iter::repeat_n('\n', line.saturating_sub(self.lines)));
        self.lines = self.lines.max(line) + lines(content);
        self.text.extend([content, close]);
    }
}

fn lines(text: &str) -> usize {
    text.matches('\n').count()
}

/// The position of the next tag or comment; the end of `text` if there is none.
fn next_tag(text: &str) -> usize {
    let starts = text.match_indices('{').map(|(at, _)| at);
    let is_tag = |at: &usize| text.get(at + 1..).is_some_and(|rest| rest.starts_with(['{', '%', '#']));
    starts.into_iter().find(is_tag).unwrap_or(text.len())
}

/// Trims `text` for the tag after it: `-` removes white space, a statement or comment removes its own
/// indentation.
fn until<'t>(text: &'t str, tag: &str, starts_line: bool) -> &'t str {
    let line = text.rfind('\n').map_or(0, |at| at + 1);
    let (above, indent) = text.split_at(line);
    match tag.as_bytes() {
        [_, _, b'-', ..] => text.trim_end(),
        [] | [_, b'{', ..] | [_, _, b'+', ..] => text,
        _ if (line > 0 || starts_line) && indent.trim().is_empty() => above,
        _ => text,
    }
}

/// Trims the text after a tag: `-` removes white space, a statement or comment removes the end of its line.
fn behind<'t>(tag: &str, text: &'t str) -> &'t str {
    match tag.as_bytes() {
        [_, _, _, .., b'-', _, b'}'] => text.trim_start(),
        [.., b'+', _, b'}'] | [.., b'}', b'}'] => text,
        _ => text.strip_prefix('\n').unwrap_or(text),
    }
}

/// Raw text, the `{% endraw %}` that ends it, and the text after that.
fn raw(text: &str) -> Option<(&str, &str, &str)> {
    text.match_indices("{%").find_map(|(at, _)| {
        let (text, end) = text.split_at(at);
        let (end, after) = end.split_at(end.find("%}")? + 2);
        let word = end.strip_prefix("{%")?.strip_suffix("%}")?;
        let word = word.strip_prefix(['-', '+']).unwrap_or(word);
        let word = word.strip_suffix(['-', '+']).unwrap_or(word);
        (word.trim() == "endraw").then_some((text, end, after))
    })
}

/// The tokens of the tag at the beginning of `text`, none for a comment, and the size of the tag in bytes.
fn tokens(text: &str) -> Made<(Vec<&str>, usize)> {
    let endless = || wrong("a tag does not end");
    let close = match text.as_bytes() {
        [_, b'#', ..] => {
            let end = text.get(2..).and_then(|text| text.find("#}")).ok_or_else(endless)?;
            return Ok((Vec::new(), end + 4));
        }
        [_, b'%', ..] => "%}",
        _ => "}}",
    };
    let mut tokens: Vec<&str> = Vec::new();
    let (mut open, mut bytes) = (0usize, 0);
    let mut rest = text.get(2..).unwrap_or("");
    rest = rest.strip_prefix(['-', '+']).unwrap_or(rest);
    loop {
        rest = rest.trim_start();
        // `}}` may end two dicts.
        if open == 0
            && let Some(after) = rest.strip_prefix(['-', '+']).unwrap_or(rest).strip_prefix(close)
        {
            return Ok((tokens, text.len() - after.len()));
        }
        let len = match rest.chars().next().ok_or_else(endless)? {
            '"' | '\'' => string_len(rest).ok_or_else(endless)?,
            '0'..='9' => number_len(rest, tokens.last() == Some(&".")),
            c if is_word(c) => rest.find(|c| !is_word(c)).unwrap_or(rest.len()),
            c if c.is_ascii_punctuation() => {
                let two = ["**", "//", "==", "!=", "<=", ">="].iter().any(|two| rest.starts_with(two));
                1 + usize::from(two)
            }
            c => return Err(wrong(format!("a tag holds the character {c:?}"))),
        };
        let (token, after) = rest.split_at(len);
        match token {
            "(" | "[" | "{" => open += 1,
            ")" | "]" | "}" => open = open.saturating_sub(1),
            _ => {}
        }
        bytes += if token.starts_with(['"', '\'']) { 0 } else { len };
        if bytes > TAG {
            return Err(wrong(format!("it has a tag of more than {TAG} bytes")));
        }
        tokens.push(token);
        rest = after;
    }
}

fn is_word(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_'
}

/// Size in bytes of the quoted text at the beginning of `text`, if it ends.
fn string_len(text: &str) -> Option<usize> {
    let quote = text.chars().next()?;
    let mut escaped = false;
    let ends = |&(_, c): &(usize, char)| {
        let ends = !escaped && c == quote;
        escaped = !escaped && c == '\\';
        ends
    };
    text.char_indices().skip(1).find(ends).map(|(at, _)| at + 1)
}

/// Size in bytes of the number at the beginning of `text`. After a dot it is an index, and has no fraction.
fn number_len(text: &str, is_index: bool) -> usize {
    let rest = |len: usize| text.get(len..).unwrap_or("");
    let is_digit = |c: char| c.is_ascii_digit() || c == '_';
    let digits = |len: usize| rest(len).find(|c| !is_digit(c)).map_or(text.len(), |more| len + more);
    if text.strip_prefix('0').is_some_and(|text| text.starts_with(['x', 'X', 'o', 'O', 'b', 'B'])) {
        return text.find(|c| !is_word(c)).unwrap_or(text.len());
    }
    let mut len = digits(0);
    let begins = |text: &str| text.starts_with(|c: char| c.is_ascii_digit());
    if !is_index && rest(len).strip_prefix('.').is_some_and(begins) {
        len = digits(len + 1);
    }
    let exponent =
        rest(len).strip_prefix(['e', 'E']).map(|text| text.strip_prefix(['+', '-']).unwrap_or(text));
    match exponent.filter(|text| !is_index && begins(text)) {
        Some(exponent) => digits(text.len() - exponent.len()),
        None => len,
    }
}
