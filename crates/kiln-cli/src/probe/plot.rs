//! Loss against bytes, as SVG: points with labels, and nothing else, so it is written here. Another axis, and a library
//! should draw it.

use std::fmt::Write;

use kiln::probe::{Probe, Probed, UNSEEN};

const WIDTH: f64 = 1000.0;
const HEIGHT: f64 = 640.0;
/// Left, right, top and bottom of the field.
const FIELD: [f64; 4] = [90.0, 960.0, 60.0, 570.0];

/// Smaller losses are drawn as this.
const LEAST: f64 = 1e-6;

pub(super) fn svg(probe: &Probe, model: &str) -> String {
    let [left, right, top, bottom] = FIELD;
    let dense = probe.dense().bytes_per_token.max(1.0);
    let ranked = probe.ranked();
    let share = |probed: &Probed| probed.bytes_per_token / dense;
    // Labels stand to the right of their points.
    let widest = 1.4 * ranked.iter().map(|probed| share(probed)).fold(0.1, f64::max);
    let highest = ranked.iter().map(|probed| probed.divergence).fold(1.0, f64::max).log10().ceil();
    let lowest = LEAST.log10();
    let x = |share: f64| left + (right - left) * share / widest;
    let y = |loss: f64| bottom - (bottom - top) * (loss.max(LEAST).log10() - lowest) / (highest - lowest);

    let mut lines = Vec::new();
    let text = |x: f64, y: f64, anchor: &str, text: &str| {
        format!("<text x='{x:.1}' y='{y:.1}' text-anchor='{anchor}'>{}</text>", escaped(text))
    };
    let rule = |y: f64, color: &str| {
        format!("<line x1='{left}' x2='{right}' y1='{y:.1}' y2='{y:.1}' stroke='{color}'/>")
    };
    lines.push(text(WIDTH / 2.0, 30.0, "middle", &format!("{model}: what a token's bytes cost")));
    lines.push(text(WIDTH / 2.0, HEIGHT - 20.0, "middle", "bytes, of those of a dense cache"));
    lines.push(text(left, 50.0, "start", "KL divergence from a dense cache, nats"));
    for power in lowest as i32..=highest as i32 {
        let loss = 10f64.powi(power);
        lines.push(rule(y(loss), "#ddd"));
        lines.push(text(left - 8.0, y(loss) + 4.0, "end", &format!("1e{power}")));
    }
    for tenth in 0..=(10.0 * widest) as usize {
        let share = tenth as f64 / 10.0;
        lines.push(text(x(share), bottom + 20.0, "middle", &format!("{share:.1}")));
    }
    lines.push(rule(y(UNSEEN), "green"));
    for probed in ranked {
        let (x, y) = (x(share(probed)), y(probed.divergence));
        lines.push(format!("<circle cx='{x:.1}' cy='{y:.1}' r='4' fill='steelblue'/>"));
        lines.push(text(x + 8.0, y + 4.0, "start", probed.cache.trim_start_matches("quantized:")));
    }

    let mut svg = format!(
        "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {HEIGHT}' font-family='sans-serif' \
         font-size='13'>\n<rect width='{WIDTH}' height='{HEIGHT}' fill='white'/>\n"
    );
    for line in lines {
        // Writing to a string does not fail.
        let _ = writeln!(svg, "{line}");
    }
    svg + "</svg>\n"
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}
