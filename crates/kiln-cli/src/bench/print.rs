//! Output of a report of `kiln bench` as Markdown, CSV or JSON.

use super::{Report, peer::Peer};
use crate::display;

/// Formats a number of bytes per second as `12.3 GB/s`.
pub(super) fn rate(bytes_a_second: f64) -> String {
    format!("{:.1} GB/s", bytes_a_second / 1e9)
}

/// Formats the report as JSON, with the names of its fields.
pub(super) fn json(report: &Report) -> String {
    serde_json::to_string_pretty(report).unwrap_or_default()
}

/// Formats the report as a table with one row per test and cache, as llama-bench does. `peer`: results of
/// another program for the same tests, which get columns of their own.
pub(super) fn markdown(report: &Report, peer: Option<&Peer>) -> String {
    let mut head: Vec<String> =
        ["model", "size", "params", "device", "type", "threads", "cache", "test", "t/s", "of bandwidth"]
            .map(str::to_owned)
            .into();
    let (several, decoded, copied) = (
        report.results.iter().any(|measured| measured.cache != report.results[0].cache),
        report.results.iter().any(|measured| measured.steps.is_some()),
        report.results.iter().any(|measured| measured.copied.is_some()),
    );
    if decoded {
        head.push("step: median, p99, longest".to_owned());
    }
    if copied {
        head.push("copied a step: up, down, of copy bandwidth".to_owned());
    }
    if several {
        head.push(format!("times {}", report.results[0].cache));
    }
    if let Some(peer) = peer {
        let threads = peer.threads.map_or_else(String::new, |n| format!(", {n} threads"));
        head.push(format!("{} {} ({}{threads}) t/s", peer.tool, peer.version, peer.dtype));
        head.push("ratio".to_owned());
    }
    let mut rows = vec![head];
    for measured in &report.results {
        let mut row = vec![
            report.model.clone(),
            display::bytes(report.bytes),
            display::count(report.params),
            report.device.clone(),
            report.dtype.clone(),
            report.threads.to_string(),
            measured.cache.clone(),
            measured.test.clone(),
            format!("{:.2} ± {:.2}", measured.tokens_per_second, measured.stddev),
            measured.bandwidth_share.map_or_else(String::new, |share| format!("{:.0} %", 100.0 * share)),
        ];
        if decoded {
            row.push(measured.steps.as_ref().map_or_else(String::new, |steps| {
                format!("{:.2}, {:.2}, {:.2} ms", steps.median, steps.p99, steps.longest)
            }));
        }
        if copied {
            row.push(measured.copied.as_ref().map_or_else(String::new, |copied| {
                let share = copied.bandwidth_share;
                let share = share.map_or_else(|| "-".to_owned(), |share| format!("{:.0} %", 100.0 * share));
                format!("{}, {}, {share}", display::bytes(copied.up), display::bytes(copied.down))
            }));
        }
        if several {
            row.push(format!("{:.2}", measured.ratio));
        }
        if let Some(peer) = peer {
            let theirs = peer.tokens_per_second(&measured.test);
            row.push(theirs.map_or_else(|| "-".to_owned(), |t| format!("{t:.2}")));
            row.push(
                theirs.map_or_else(|| "-".to_owned(), |t| format!("{:.2}", measured.tokens_per_second / t)),
            );
        }
        rows.push(row);
    }
    table(&rows)
}

/// A Markdown table, whose first row is the head.
pub(super) fn table(rows: &[Vec<String>]) -> String {
    let widths: Vec<usize> = (0..rows[0].len())
        .map(|column| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0))
        .collect();
    let line = |row: &Vec<String>| {
        let cells: Vec<String> =
            row.iter().zip(&widths).map(|(cell, &width)| format!("{cell:<width$}")).collect();
        format!("| {} |", cells.join(" | "))
    };
    let rule: Vec<String> = widths.iter().map(|&width| "-".repeat(width)).collect();
    let mut lines = vec![line(&rows[0]), line(&rule)];
    lines.extend(rows[1..].iter().map(line));
    lines.join("\n")
}

/// Formats the report as CSV, with a header. Empty: not measured.
pub(super) fn csv(report: &Report, peer: Option<&Peer>) -> String {
    let mut text =
        "model,bytes,params,device,dtype,threads,cache,test,tokens_per_second,stddev,bandwidth_share,\
                    median_ms,p99_ms,longest_ms,bytes_up,bytes_down,copy_bandwidth_share,times_first_cache,\
                    peer_tokens_per_second,ratio\n"
            .to_owned();
    // Names come from folders, whose names may contain a comma or a quote.
    let quoted = |text: &str| format!("\"{}\"", text.replace('"', "\"\""));
    for measured in &report.results {
        let theirs = peer.and_then(|peer| peer.tokens_per_second(&measured.test));
        let number = |n: Option<f64>| n.map_or_else(String::new, |n| format!("{n:.4}"));
        text.push_str(&format!(
            "{},{},{},{},{},{},{},{},{:.4},{:.4},{},{},{},{},{},{},{},{:.4},{},{}\n",
            quoted(&report.model),
            report.bytes,
            report.params,
            report.device,
            report.dtype,
            report.threads,
            quoted(&measured.cache),
            measured.test,
            measured.tokens_per_second,
            measured.stddev,
            number(measured.bandwidth_share),
            number(measured.steps.as_ref().map(|steps| steps.median)),
            number(measured.steps.as_ref().map(|steps| steps.p99)),
            number(measured.steps.as_ref().map(|steps| steps.longest)),
            measured.copied.as_ref().map_or_else(String::new, |copied| copied.up.to_string()),
            measured.copied.as_ref().map_or_else(String::new, |copied| copied.down.to_string()),
            number(measured.copied.as_ref().and_then(|copied| copied.bandwidth_share)),
            measured.ratio,
            number(theirs),
            number(theirs.map(|theirs| measured.tokens_per_second / theirs)),
        ));
    }
    text
}
