//! Compares lists in the user documentation with the code.

use std::{fmt::Write, fs, path::PathBuf};

use kiln::expert::{STRATEGIES, models::ARCHITECTURES, quantizers};
use kiln_weights::{Format, Mixture};

type List = fn() -> String;

/// All lists: the page, the name on the page, and a function that generates the list.
const LISTS: [(&str, &str, List); 8] = [
    ("README.md", "caches", caches),
    ("README.md", "model types", model_types),
    ("docs/support.md", "model types", model_types),
    ("docs/caches.md", "strategies", strategies),
    ("docs/quantization.md", "cache formats", cache_formats),
    ("docs/formats.md", "weight formats", weight_formats),
    ("docs/gguf.md", "mixtures", mixtures),
    ("docs/library.md", "examples", examples),
];
const END: &str = "<!-- end of the list -->";

#[test]
fn lists_in_the_pages_are_those_of_the_code() {
    let mut stale = String::new();
    for (page, name, list) in LISTS {
        let path = root().join(page);
        let text = fs::read_to_string(&path).unwrap();
        let begin = format!("<!-- list: {name} -->\n");
        let (before, rest) = text.split_once(&begin).unwrap_or_else(|| panic!("{page} lacks {begin}"));
        let (found, after) = rest.split_once(END).unwrap_or_else(|| panic!("{page} lacks {END}"));
        let list = format!("\n{}\n", list());
        if found == list {
            continue;
        }
        if std::env::var_os("KILN_WRITE_LISTS").is_some() {
            fs::write(&path, format!("{before}{begin}{list}{END}{after}")).unwrap();
        } else {
            write!(stale, "{page}:\n{begin}{list}{END}\n\n").unwrap();
        }
    }
    assert!(stale.is_empty(), "stale lists; KILN_WRITE_LISTS=1 writes these:\n\n{stale}");
}

#[test]
fn every_list_in_the_pages_is_compared() {
    let pages = fs::read_dir(root().join("docs")).unwrap().map(|entry| entry.unwrap().path());
    let pages = pages.filter(|path| path.extension().is_some_and(|e| e == "md"));
    let marked = pages.chain([root().join("README.md")]).map(|path| {
        let text = fs::read_to_string(path).unwrap();
        text.matches("<!-- list: ").count()
    });
    assert_eq!(marked.sum::<usize>(), LISTS.len());
}

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Formats a Markdown table; the first row contains the column names.
fn table<const N: usize>(rows: impl IntoIterator<Item = [String; N]>) -> String {
    let mut lines: Vec<_> = rows.into_iter().map(|row| format!("| {} |", row.join(" | "))).collect();
    lines.insert(1, format!("|{}", "---|".repeat(N)));
    lines.join("\n") + "\n"
}

fn codes<'a>(names: impl IntoIterator<Item = &'a str>) -> String {
    names.into_iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
}

fn bits(format: Format) -> String {
    (format.block_bytes() as f64 * 8.0 / format.block() as f64).to_string()
}

fn caches() -> String {
    let rows = STRATEGIES.iter().map(|cache| [codes([cache.name]), cache.summary.to_owned()]);
    table([["`--cache`", "effect"].map(str::to_owned)].into_iter().chain(rows))
}

fn strategies() -> String {
    let rows = STRATEGIES.iter().map(|cache| {
        let settings = codes(cache.settings.iter().map(|(name, _)| *name));
        [codes([cache.name]), codes(cache.aliases.iter().copied()), cache.summary.to_owned(), settings]
    });
    let names = ["`--cache`", "also called", "effect", "settings"].map(str::to_owned);
    table([names].into_iter().chain(rows))
}

fn cache_formats() -> String {
    let rows = quantizers::CACHE_FORMATS.iter().map(|format| {
        let bits: Vec<_> = format.bits.iter().map(ToString::to_string).collect();
        [codes([&*format!("format={}", format.name)]), bits.join(", "), format.summary.to_owned()]
    });
    table([["setting", "bits", "scales"].map(str::to_owned)].into_iter().chain(rows))
}

fn model_types() -> String {
    let names = codes(ARCHITECTURES.iter().map(|architecture| architecture.model_type()));
    table([["`model_type`".to_owned()], [names]])
}

fn weight_formats() -> String {
    let rows = Format::ALL.into_iter().map(|format| {
        let of = if format.ggml_type().is_some() { "GGUF" } else { "folders" };
        [codes([format.name()]), bits(format), format.block().to_string(), of.to_owned()]
    });
    let names = ["format", "bits a number", "numbers of a block", "found in"].map(str::to_owned);
    table([names].into_iter().chain(rows))
}

fn mixtures() -> String {
    let in_files = Mixture::ALL.into_iter().filter(|mixture| mixture.file_type().is_some());
    let rows = in_files.map(|mixture| {
        let most = mixture.format();
        [codes([mixture.name()]), codes([most.name()]), bits(most)]
    });
    let names = ["`--quant`", "most matrices", "bits a number"].map(str::to_owned);
    table([names].into_iter().chain(rows))
}

/// Returns the name of each example and the first sentence of its documentation.
fn examples() -> String {
    let folder = root().join("examples");
    let manifest = fs::read_to_string(folder.join("Cargo.toml")).unwrap();
    let entries = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path());
    let mut rows: Vec<_> = entries
        .filter_map(|path| {
            let name = path.file_stem()?.to_str()?.to_owned();
            let file = if path.is_dir() { path.join("main.rs") } else { path };
            let text =
                fs::read_to_string(&file).ok().filter(|_| file.extension().is_some_and(|e| e == "rs"))?;
            let lines = text.lines().map_while(|line| line.strip_prefix("//! "));
            let said = lines.collect::<Vec<_>>().join(" ");
            let said = said.split(": `cargo").next()?.split(". ").next()?.trim_end_matches('.');
            let is_built = manifest.contains(&format!("[[example]]\nname = \"{name}\""));
            assert!(is_built || name == "lib", "examples/Cargo.toml does not have {name}");
            (name != "lib").then(|| [format!("`{name}`"), said.to_owned()])
        })
        .collect();
    rows.sort();
    table([["example", "shows"].map(str::to_owned)].into_iter().chain(rows))
}
