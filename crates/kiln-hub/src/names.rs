//! Validation of file names in a repository, which are untrusted.

/// Maximum length of a name in bytes. Operating systems refuse longer names.
const LONGEST: usize = 1024;

/// Maximum length in bytes of a path component.
const LONGEST_PART: usize = 255;

/// Whether a name stays within the folder that it is joined to, on every system: no `..`, no root, no drive,
/// no backslash.
pub(crate) fn is_safe(name: &str) -> bool {
    let plain = |part: &str| !matches!(part, "" | "." | "..") && part.len() <= LONGEST_PART;
    let strange = |c: char| c.is_control() || matches!(c, '\\' | ':');
    name.len() <= LONGEST && !name.contains(strange) && name.split('/').all(plain)
}

/// Whether a text is a commit hash: 40 hexadecimal digits.
pub(crate) fn is_commit(text: &str) -> bool {
    text.len() == 40 && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// Percent-encodes a text as one path segment of a URL (RFC 3986).
pub(crate) fn encode(part: &str) -> String {
    let mut encoded = String::with_capacity(part.len());
    for byte in part.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => encoded.push(byte.into()),
            _ => encoded.push_str(&format!("%{byte:02X}")),
        }
    }
    encoded
}

/// Returns the name most similar to `wanted`, if it is close enough to be a misspelling.
pub(crate) fn nearest<'a>(wanted: &str, names: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    /// Maximum number of names compared; a listing may have any number.
    const COMPARED: usize = 1000;

    let close = names.into_iter().filter(|name| name.len().abs_diff(wanted.len()) <= wanted.len() / 3);
    let measured = close.take(COMPARED).map(|name| (distance(wanted, name), name));
    let (edits, name) = measured.min_by_key(|(edits, _)| *edits)?;
    (edits <= wanted.len() / 3).then_some(name)
}

/// Returns the case-insensitive Levenshtein distance: the number of insertions, removals and replacements
/// that turn `a` into `b`.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().take(LONGEST_PART).flat_map(char::to_lowercase).collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, of_a) in a.chars().take(LONGEST_PART).flat_map(char::to_lowercase).enumerate() {
        let mut last = i + 1;
        let mut next = vec![last];
        for (pair, of_b) in row.windows(2).zip(&b) {
            let &[diagonal, above] = pair else { continue };
            last = (diagonal + usize::from(of_a != *of_b)).min(above + 1).min(last + 1);
            next.push(last);
        }
        row = next;
    }
    row.last().copied().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_leave_the_folder_are_not_safe() {
        for name in ["config.json", "Q4_K_M/a-00001-of-00002.gguf", "a b#?.gguf", "..a/b.."] {
            assert!(is_safe(name), "{name}");
        }
        let long = "x".repeat(256);
        for name in [
            "",
            "..",
            "../a",
            "a/../b",
            "/etc/passwd",
            "a//b",
            "a/",
            "./a",
            "C:\\a",
            "c:a",
            "a\\..\\b",
            "a\0",
            "a\n",
            &long,
        ] {
            assert!(!is_safe(name), "{name:?}");
        }
    }

    #[test]
    fn encoding_escapes_characters_with_a_meaning_in_urls() {
        assert_eq!(encode("refs/pr 1?#%.é"), "refs%2Fpr%201%3F%23%25.%C3%A9");
    }

    #[test]
    fn a_name_is_suggested_only_if_it_is_similar() {
        let names = ["model-Q4_K_M.gguf", "model-Q8_0.gguf", "README.md"];
        assert_eq!(nearest("model-q8_1.gguf", names), Some("model-Q8_0.gguf"));
        assert_eq!(nearest("something-else.gguf", names), None);
        assert_eq!(nearest("", names), None);
        assert_eq!(distance("kitten", "Sitting"), 3);
        assert_eq!(distance("", "abc"), 3);
    }
}
