//! Input of messages: from a person at a terminal, or from a pipe with one message per line.

use std::{
    fs,
    io::{self, BufRead, IsTerminal},
    path::PathBuf,
};

use etcetera::BaseStrategy;
use kiln::{Error, Result};
use rustyline::{DefaultEditor, error::ReadlineError};

use crate::output::note;

/// Opens and closes a message of several lines.
const QUOTES: &str = "\"\"\"";

pub(super) enum Input {
    Terminal { editor: Box<DefaultEditor>, history: Option<PathBuf> },
    Pipe(io::Lines<io::StdinLock<'static>>),
}

/// A line of input.
enum Line {
    Text(String),
    /// Ctrl-C: the line is discarded.
    GivenUp,
    End,
}

impl Input {
    pub(super) fn new() -> Result<Self> {
        if !io::stdin().is_terminal() {
            return Ok(Self::Pipe(io::stdin().lock().lines()));
        }
        let mut editor = Box::new(DefaultEditor::new().map_err(|e| wrong(&e))?);
        let history = history_file();
        if let Some(path) = &history {
            // There is no history at first.
            _ = editor.load_history(path);
        }
        Ok(Self::Terminal { editor, history })
    }

    pub(super) fn is_terminal(&self) -> bool {
        matches!(self, Self::Terminal { .. })
    }

    /// The next message or command; `None` at the end of the input.
    ///
    /// A message continues on the next line after a backslash at the end of a line, or until three quotes
    /// close it.
    pub(super) fn next(&mut self) -> Result<Option<String>> {
        let mut text = String::new();
        let mut quoted = false;
        let mut first = true;
        loop {
            let line = match self.line(if first { ">>> " } else { "... " })? {
                Line::Text(line) => line,
                Line::GivenUp => {
                    (text, quoted, first) = (String::new(), false, true);
                    continue;
                }
                Line::End if first => return Ok(None),
                Line::End if quoted => {
                    let why = format!("the message is not closed; end it with {QUOTES}");
                    return Err(Error::Prompt { why });
                }
                Line::End => break,
            };
            let mut part = line.as_str();
            if first && let Some(rest) = part.trim_start().strip_prefix(QUOTES) {
                (part, quoted) = (rest, true);
            }
            first = false;
            let closes = if quoted { part.trim_end().strip_suffix(QUOTES) } else { None };
            let goes_on = if quoted { None } else { part.strip_suffix('\\') };
            text.push_str(closes.or(goes_on).unwrap_or(part));
            if closes.is_some() || (!quoted && goes_on.is_none()) {
                break;
            }
            text.push('\n');
        }
        self.remember(&text);
        Ok(Some(text))
    }

    fn line(&mut self, prompt: &str) -> Result<Line> {
        match self {
            Self::Terminal { editor, .. } => match editor.readline(prompt) {
                Ok(line) => Ok(Line::Text(line)),
                Err(ReadlineError::Interrupted) => {
                    note("(Ctrl-D or /exit leaves)");
                    Ok(Line::GivenUp)
                }
                Err(ReadlineError::Eof) => Ok(Line::End),
                Err(e) => Err(wrong(&e)),
            },
            Self::Pipe(lines) => match lines.next() {
                Some(Ok(line)) => Ok(Line::Text(line)),
                Some(Err(e)) => Err(wrong(&e)),
                None => Ok(Line::End),
            },
        }
    }

    /// Appends a message to the history file at once, since the program may end in many ways.
    fn remember(&mut self, text: &str) {
        if let Self::Terminal { editor, history } = self
            && !text.trim().is_empty()
        {
            _ = editor.add_history_entry(text);
            if let Some(path) = history
                && let Err(e) = editor.append_history(path)
            {
                tracing::debug!(target: "kiln::chat", "the history is not kept: {e}");
            }
        }
    }
}

fn wrong(error: &dyn std::error::Error) -> Error {
    Error::Prompt { why: format!("standard input: {error}") }
}

/// The history file in the user's data folder; `None` if there is no such folder.
fn history_file() -> Option<PathBuf> {
    let folder = etcetera::choose_base_strategy().ok()?.data_dir().join("kiln");
    fs::create_dir_all(&folder).ok()?;
    Some(folder.join("chat_history"))
}
