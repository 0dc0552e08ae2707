//! A template's text, before the engine reads it.

use super::meter::wrong;

type Made<T> = Result<T, minijinja::Error>;

/// Bytes of a tag, texts in quotes left out; the longest known one has 276. The engine goes deeper with each operator.
const TAG: usize = 4096;
/// `{% elif %}`s; likewise.
const ALTERNATIVES: usize = 500;

/// Ends the lines of a template by `\n` and writes two tags as minijinja takes them. `{% generation %}` marks what the
/// model said, for training, and is a scope. Behind `{% raw %}`, Jinja keeps the end of the line.
pub(super) fn respelled(source: &str) -> Made<String> {
    let source = source.replace("\r\n", "\n").replace('\r', "\n");
    let mut out = String::with_capacity(source.len());
    let mut alternatives = 0;
    let mut raw = false;
    let mut rest = source.as_str();
    while let Some(at) = rest.find('{') {
        let (text, after) = rest.split_at(at);
        out.push_str(text);
        let Some(len) = tag_len(after, raw)? else {
            out.push('{');
            rest = after.get(1..).unwrap_or("");
            continue;
        };
        let (tag, after) = after.split_at(len);
        let word = tag.trim_start_matches(['{', '%', '-', '+']).trim_end_matches(['}', '%', '-', '+']).trim();
        match word {
            "endraw" => raw = false,
            _ if raw => {}
            "raw" => raw = true,
            word if word.starts_with("elif") => alternatives += 1,
            _ => {}
        }
        match word {
            "generation" if !raw => out.push_str(&tag.replace("generation", "with _generation = true")),
            "endgeneration" if !raw => out.push_str(&tag.replace("endgeneration", "endwith")),
            "raw" if tag.ends_with("raw %}") && after.starts_with('\n') => out.extend([tag, "\n"]),
            _ => out.push_str(tag),
        }
        rest = after;
    }
    out.push_str(rest);
    match alternatives {
        ..=ALTERNATIVES => Ok(out),
        _ => Err(wrong(format!("it has more than {ALTERNATIVES} elifs"))),
    }
}

/// Bytes of the tag or comment that `text` begins with, if it does. Within raw text only `{% endraw %}` is one.
fn tag_len(text: &str, raw: bool) -> Made<Option<usize>> {
    let end = match text.get(..2) {
        Some("{%") if raw => {
            let inner = text.trim_start_matches(['{', '%', '-', '+', ' ', '\n', '\t']);
            return Ok(text.find("%}").map(|at| at + 2).filter(|_| inner.starts_with("endraw")));
        }
        Some("{{") if !raw => "}}",
        Some("{%") => "%}",
        Some("{#") if !raw => return Ok(text.find("#}").map(|at| at + 2)),
        _ => return Ok(None),
    };
    let (mut quote, mut escaped) = (None, false);
    let (mut bytes, mut braces) = (0, 0usize);
    for (at, c) in text.char_indices().skip(2) {
        match quote {
            Some(_) if escaped => escaped = false,
            Some(_) if c == '\\' => escaped = true,
            Some(open) if c == open => quote = None,
            Some(_) => {}
            // `}}` may end two dicts.
            None if braces == 0 && text.get(at..).is_some_and(|rest| rest.starts_with(end)) => {
                return Ok(Some(at + 2));
            }
            None => {
                bytes += c.len_utf8();
                match c {
                    '"' | '\'' => quote = Some(c),
                    '{' => braces += 1,
                    '}' => braces = braces.saturating_sub(1),
                    _ => {}
                }
            }
        }
        if bytes > TAG {
            return Err(wrong(format!("it has a tag of more than {TAG} bytes")));
        }
    }
    Ok(None)
}
