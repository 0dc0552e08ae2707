//! Calls of tools while they are written: a name, and then arguments piece by piece.

use super::calls::Body;

/// The beginning of a call, up to the first brace of its arguments.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Beginning {
    pub(super) name: String,
    /// Number of bytes, the brace included.
    pub(super) len: usize,
    /// Whether the arguments are a value of an object.
    pub(super) is_inner: bool,
}

impl Body {
    /// The beginning of a call in JSON with the name first, or of `NAME[ARGS]{`; `None` if there is none yet,
    /// or the call is written otherwise.
    pub(super) fn begins(self, text: &str) -> Option<Beginning> {
        match self {
            Self::Tagged => object(text),
            Self::Mistral => object(text).or_else(|| named(text)),
            Self::DeepSeek | Self::Python => None,
        }
    }
}

/// `{"name": "NAME", "arguments": {`
fn object(text: &str) -> Option<Beginning> {
    let mut rest = text.trim_start_matches(is_between);
    let mut take = |wanted: &str| {
        rest = rest.trim_start().strip_prefix(wanted)?;
        Some(rest)
    };
    take("{")?;
    take("\"name\"")?;
    take(":")?;
    let (name, _) = take("\"")?.split_once('"')?;
    take(name)?;
    take("\"")?;
    take(",")?;
    ["\"arguments\"", "\"parameters\"", "\"args\""].into_iter().find_map(&mut take)?;
    take(":")?;
    let rest = take("{")?;
    let is_name = !name.is_empty() && !name.contains(['\\', '<']);
    is_name.then(|| Beginning { name: name.to_owned(), len: text.len() - rest.len(), is_inner: true })
}

/// `NAME[ARGS]{`
fn named(text: &str) -> Option<Beginning> {
    let (head, _) = text.split_once('{')?;
    let own = head.trim_start();
    let own = own.strip_prefix("[TOOL_CALLS]").unwrap_or(own);
    let name = own.split('[').next()?.trim();
    let is_name = !name.is_empty() && !name.contains(|c: char| c.is_whitespace() || "\"',;]".contains(c));
    is_name.then(|| Beginning { name: name.to_owned(), len: head.len() + 1, is_inner: false })
}

/// Whether the character stands between calls.
pub(super) fn is_between(c: char) -> bool {
    c.is_whitespace() || matches!(c, '[' | ']' | ',' | ';')
}

/// A place in an object that is being written, after its first brace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    /// Number of braces and brackets around it.
    depth: usize,
    in_text: bool,
    /// Whether the character before was a backslash in a text.
    is_escaped: bool,
}

impl Place {
    pub(super) const BEGUN: Self = Self { depth: 1, in_text: false, is_escaped: false };

    /// Goes on through `text`. Returns the number of bytes of it that are of the object, and whether it has
    /// ended. A mark outside of a text ends it, too: braces were forgotten.
    pub(super) fn pass(&mut self, text: &str) -> (usize, bool) {
        for (at, byte) in text.bytes().enumerate() {
            match byte {
                _ if self.is_escaped => self.is_escaped = false,
                b'\\' if self.in_text => self.is_escaped = true,
                b'"' => self.in_text = !self.in_text,
                _ if self.in_text => {}
                // All marks begin so, and nothing in JSON does.
                b'<' => return (at, true),
                b'{' | b'[' => self.depth += 1,
                b'}' | b']' => {
                    self.depth -= 1;
                    if self.depth == 0 {
                        return (at + 1, true);
                    }
                }
                _ => {}
            }
        }
        (text.len(), false)
    }
}
