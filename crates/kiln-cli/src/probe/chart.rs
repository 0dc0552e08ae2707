//! A chart of loss against bytes as SVG. With only points and labels it is written here; another axis would
//! justify a library.

use std::fmt::Write;

use kiln::expert::probe::UNSEEN;

const WIDTH: f64 = 1000.0;
const HEIGHT: f64 = 640.0;
/// Left, right, top and bottom of the plot area.
const FIELD: [f64; 4] = [90.0, 960.0, 60.0, 570.0];

/// Smaller losses are drawn as this one.
const LEAST: f64 = 1e-6;

/// A chart of loss against bytes.
pub(super) struct Chart<'a> {
    pub(super) title: String,
    /// Label of the x axis: the size that all sizes are divided by.
    pub(super) across: &'static str,
    /// Label of the y axis: the kind of loss.
    pub(super) up: &'static str,
    pub(super) points: Vec<Point<'a>>,
}

pub(super) struct Point<'a> {
    pub(super) name: &'a str,
    /// Bytes as a share of those of the lossless variant.
    pub(super) share: f64,
    /// Divergence in nats.
    pub(super) divergence: f64,
}

impl Chart<'_> {
    pub(super) fn svg(&self) -> String {
        let Self { title, across, up, points } = self;
        let [left, right, top, bottom] = FIELD;
        // Labels stand to the right of their points.
        let widest = 1.4 * points.iter().map(|point| point.share).fold(0.1, f64::max);
        let finite = points.iter().map(|point| point.divergence).filter(|loss| loss.is_finite());
        let highest = finite.fold(1.0, f64::max).log10().ceil();
        let lowest = LEAST.log10();
        let x = |share: f64| left + (right - left) * share / widest;
        // An infinite loss is at the top.
        let power = |loss: f64| if loss.is_finite() { loss.max(LEAST).log10() } else { highest };
        let y = |loss: f64| bottom - (bottom - top) * (power(loss) - lowest) / (highest - lowest);

        let mut lines = Vec::new();
        let text = |x: f64, y: f64, anchor: &str, text: &str| {
            format!("<text x='{x:.1}' y='{y:.1}' text-anchor='{anchor}'>{}</text>", escaped(text))
        };
        let rule = |y: f64, color: &str| {
            format!("<line x1='{left}' x2='{right}' y1='{y:.1}' y2='{y:.1}' stroke='{color}'/>")
        };
        lines.push(text(WIDTH / 2.0, 30.0, "middle", title));
        lines.push(text(WIDTH / 2.0, HEIGHT - 20.0, "middle", across));
        lines.push(text(left, 50.0, "start", up));
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
        for Point { name, share, divergence } in points {
            let (x, y) = (x(*share), y(*divergence));
            lines.push(format!("<circle cx='{x:.1}' cy='{y:.1}' r='4' fill='steelblue'/>"));
            lines.push(text(x + 8.0, y + 4.0, "start", name));
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
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}
