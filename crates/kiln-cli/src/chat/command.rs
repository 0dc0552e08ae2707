//! Commands that can be typed instead of a message.

use std::{path::PathBuf, str::FromStr};

use kiln::Error;

use crate::display;

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Command {
    Help,
    Reset,
    Save(PathBuf),
    Load(PathBuf),
    Stats,
    Cache,
    /// `None` shows the current one.
    System(Option<String>),
    Exit,
}

/// Name, arguments and description of each command.
const COMMANDS: [(&str, &str, &str); 8] = [
    ("/help", "", "this list"),
    ("/reset", "", "begin a new conversation; the system message stays"),
    ("/save", "FILE", "write the conversation, as JSON"),
    ("/load", "FILE", "go on with a conversation that was saved"),
    ("/stats", "", "tokens and times of the latest answer"),
    ("/cache", "", "what the cache holds"),
    ("/system", "TEXT", "tell the model something before anything else; without TEXT, show it"),
    ("/exit", "", "leave; so does Ctrl-D"),
];

pub(super) fn help() -> String {
    let rows: Vec<Vec<String>> = COMMANDS
        .iter()
        .map(|(name, takes, does)| vec![format!("{name} {takes}"), (*does).to_owned()])
        .collect();
    let table = display::table(&rows);
    format!(
        "{table}\n\nA line that ends with \\ goes on in the next; \"\"\" opens and closes a message of several lines.\n\
         Ctrl-C stops an answer."
    )
}

impl FromStr for Command {
    type Err = Error;

    fn from_str(line: &str) -> Result<Self, Error> {
        let (name, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
        let rest = rest.trim();
        let file = |name| match rest {
            "" => Err(Error::Setting { name, why: "needs the name of a file".to_owned() }),
            file => Ok(PathBuf::from(file)),
        };
        Ok(match name {
            "/help" => Self::Help,
            "/reset" => Self::Reset,
            "/save" => Self::Save(file("/save")?),
            "/load" => Self::Load(file("/load")?),
            "/stats" => Self::Stats,
            "/cache" => Self::Cache,
            "/system" => Self::System((!rest.is_empty()).then(|| rest.to_owned())),
            "/exit" | "/quit" => Self::Exit,
            _ => {
                let known = COMMANDS.iter().map(|(name, ..)| (*name).to_owned()).collect();
                return Err(Error::Unknown { what: "command", name: name.to_owned(), known });
            }
        })
    }
}
