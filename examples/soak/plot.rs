//! Plots the samples as SVG, one panel per quantity. Only lines over time are needed, so no plotting crate is
//! used.

use std::fmt::Write;

use crate::samples::{QUANTITIES, Quantity, Sample, Verdict};

const WIDTH: f64 = 1020.0;
/// Size of a panel, including the labels around its field.
const PANEL: [f64; 2] = [500.0, 210.0];
/// Left, right, top and bottom of a panel's field.
const FIELD: [f64; 4] = [90.0, 480.0, 35.0, 160.0];
/// Height of the title.
const HEAD: f64 = 50.0;
const COLUMNS: usize = 2;
/// Maximum number of points in a line: a screen shows no more.
const POINTS: usize = 600;

pub(crate) fn svg(title: &str, samples: &[Sample], warm_up: usize, verdicts: &[Option<Verdict>]) -> String {
    let height = HEAD + PANEL[1] * QUANTITIES.len().div_ceil(COLUMNS) as f64;
    let mut svg = format!(
        "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {height}' font-family='sans-serif' \
         font-size='13'>\n<rect width='{WIDTH}' height='{height}' fill='white'/>\n"
    );
    let rounds = samples.len().saturating_sub(1);
    let head = format!("{title}: {rounds} rounds; grey: warming up");
    let mut lines = vec![text(WIDTH / 2.0, 28.0, "middle", &head)];
    for (i, (quantity, verdict)) in QUANTITIES.iter().zip(verdicts).enumerate() {
        let (x, y) = ((i % COLUMNS) as f64 * PANEL[0], HEAD + (i / COLUMNS) as f64 * PANEL[1]);
        lines.push(format!("<g transform='translate({x} {y})'>"));
        lines.extend(panel(quantity, samples, warm_up, verdict.as_ref()));
        lines.push("</g>".to_owned());
    }
    for line in lines {
        // Writing to a string cannot fail.
        let _ = writeln!(svg, "{line}");
    }
    svg + "</svg>\n"
}

fn panel(quantity: &Quantity, samples: &[Sample], warm_up: usize, verdict: Option<&Verdict>) -> Vec<String> {
    let [left, right, top, bottom] = FIELD;
    let name = |said: &str| text(left, top - 10.0, "start", &format!("{}{said}", quantity.name));
    let point = |sample: &Sample| Some((sample.seconds / 60.0, (quantity.of)(sample)?));
    let points = |samples: &[Sample]| samples.iter().filter_map(point).collect::<Vec<(f64, f64)>>();
    let Some(verdict) = verdict else { return vec![name(": not measured")] };
    let warming = points(samples.get(..=warm_up).unwrap_or(samples));
    let judged = points(samples.get(warm_up..).unwrap_or(&[]));

    let minutes = judged.iter().map(|point| point.0).fold(1e-9, f64::max);
    // The axis starts at 0, so that a small increase looks small; it includes the allowed maximum.
    let highest = 1.1
        * warming.iter().chain(&judged).map(|point| point.1).fold(verdict.most().unwrap_or(0.0), f64::max);
    let highest = if highest > 0.0 { highest } else { 1.0 };
    let x = |at: f64| left + (right - left) * at / minutes;
    let y = |value: f64| bottom - (bottom - top) * value / highest;

    let mut lines = vec![name(&format!(": {}", verdict.said()))];
    for tick in 0..=2 {
        let (value, at) = (highest * f64::from(tick) / 2.0, minutes * f64::from(tick) / 2.0);
        lines.push(format!(
            "<line x1='{left}' x2='{right}' y1='{0:.1}' y2='{0:.1}' stroke='#ddd'/>",
            y(value)
        ));
        lines.push(text(left - 8.0, y(value) + 4.0, "end", &quantity.text(value)));
        let unit = if tick == 2 { " min" } else { "" };
        lines.push(text(x(at), bottom + 20.0, "middle", &format!("{at:.1}{unit}")));
    }
    if let Some(most) = verdict.most().map(y) {
        lines.push(format!(
            "<line x1='{left}' x2='{right}' y1='{most:.1}' y2='{most:.1}' stroke='green' stroke-dasharray='4 4'/>"
        ));
    }
    let every = judged.len().div_ceil(POINTS).max(1);
    let mut line = |points: &[(f64, f64)], color: &str| {
        let kept = points.iter().enumerate().filter(|(i, _)| i % every == 0 || i + 1 == points.len());
        let at: Vec<String> = kept.map(|(_, &(at, value))| format!("{:.1},{:.1}", x(at), y(value))).collect();
        lines.push(format!(
            "<polyline points='{}' fill='none' stroke='{color}' stroke-width='1.5'/>",
            at.join(" ")
        ));
    };
    line(&warming, "#aaa");
    line(&judged, "steelblue");
    lines
}

fn text(x: f64, y: f64, anchor: &str, text: &str) -> String {
    let escaped = text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    format!("<text x='{x:.1}' y='{y:.1}' text-anchor='{anchor}'>{escaped}</text>")
}
