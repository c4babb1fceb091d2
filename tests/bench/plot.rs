//! The distributions as a picture: for each latency, which part of all requests took no longer.

use std::fmt::Write as _;

use super::{distribution::Distribution, report::Panel};

const WIDTH: f64 = 760.0;
const PANEL: f64 = 250.0;
const LEFT: f64 = 60.0;
const RIGHT: f64 = 215.0;
const TOP: f64 = 40.0;
const BOTTOM: f64 = 45.0;
/// Points of a curve.
const POINTS: u32 = 200;
/// Told apart also by people who do not see all colours (Okabe and Ito).
const COLOURS: [&str; 4] = ["#0072b2", "#d55e00", "#009e73", "#cc79a7"];

/// The whole picture, one panel below the other. Panels without curves are left out.
pub(crate) fn svg(panels: &[Panel]) -> String {
    let panels: Vec<_> = panels
        .iter()
        .filter(|panel| !panel.curves.is_empty())
        .collect();
    let height = PANEL * panels.len() as f64;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"{WIDTH}\" height=\"{height}\" fill=\"#ffffff\"/>\n"
    );
    for (index, panel) in panels.into_iter().enumerate() {
        let y = PANEL * index as f64;
        svg += &format!("<g transform=\"translate(0 {y})\">\n{}</g>\n", draw(panel));
    }
    svg + "</svg>\n"
}

/// A logarithmic axis from one power of ten to another, in microseconds.
struct Axis {
    first: i32,
    last: i32,
}

impl Axis {
    fn over(panel: &Panel) -> Self {
        let ends = panel.curves.iter().flat_map(|(_, curve)| {
            let samples = curve.ascending();
            [samples.first(), samples.last()].into_iter().flatten()
        });
        let tens = |value: &f64| value.max(1.0).log10();
        let (mut first, mut last) = (f64::MAX, f64::MIN);
        for end in ends.map(tens) {
            first = first.min(end.floor());
            last = last.max(end.ceil());
        }
        Self {
            first: first as i32,
            last: (last as i32).max(first as i32 + 1),
        }
    }

    fn place(&self, micros: f64) -> f64 {
        let along = micros.max(1.0).log10() - f64::from(self.first);
        LEFT + along / f64::from(self.last - self.first) * (WIDTH - LEFT - RIGHT)
    }
}

fn height_of(part: f64) -> f64 {
    TOP + (1.0 - part) * (PANEL - TOP - BOTTOM)
}

fn time(micros: f64) -> String {
    match micros {
        ..1e3 => format!("{micros:.0} µs"),
        1e3..1e6 => {
            format!("{:.3} ms", micros / 1e3)
                .trim_end_matches(" ms")
                .trim_end_matches('0')
                .trim_end_matches('.')
                .to_owned()
                + " ms"
        }
        _ => format!("{:.1} s", micros / 1e6),
    }
}

fn draw(panel: &Panel) -> String {
    let axis = Axis::over(panel);
    let (bottom, end) = (height_of(0.0), WIDTH - RIGHT);
    let mut svg = format!(
        "<text x=\"{LEFT}\" y=\"22\" font-size=\"14\" font-weight=\"bold\">{}</text>\n",
        panel.title
    );
    for ten in axis.first..=axis.last {
        let micros = 10f64.powi(ten);
        let x = axis.place(micros);
        let (top, below) = (height_of(1.0), bottom + 17.0);
        svg += &format!(
            "<line x1=\"{x:.1}\" y1=\"{top}\" x2=\"{x:.1}\" y2=\"{bottom}\" stroke=\"#dddddd\"/>\n\
             <text x=\"{x:.1}\" y=\"{below}\" text-anchor=\"middle\">{}</text>\n",
            time(micros)
        );
    }
    for part in [0.0, 0.5, 0.9, 0.99] {
        let (y, x) = (height_of(part), LEFT - 6.0);
        // 99 % and 100 % are too near to each other for two labels.
        let label = y + 4.0 + if part == 0.9 { 4.0 } else { 0.0 };
        svg += &format!(
            "<line x1=\"{LEFT}\" y1=\"{y:.1}\" x2=\"{end}\" y2=\"{y:.1}\" stroke=\"#dddddd\"/>\n\
             <text x=\"{x}\" y=\"{label:.1}\" text-anchor=\"end\">{:.0} %</text>\n",
            part * 100.0
        );
    }
    for (index, ((name, curve), colour)) in panel.curves.iter().zip(COLOURS).enumerate() {
        svg += &line(&axis, curve, colour);
        let (x, y) = (end + 12.0, TOP + 14.0 + 34.0 * index as f64);
        svg += &format!(
            "<text x=\"{x}\" y=\"{y}\" fill=\"{colour}\" font-weight=\"bold\">{name}</text>\n\
             <text x=\"{x}\" y=\"{}\" fill=\"#555555\">p50 {}, p99 {}</text>\n",
            y + 15.0,
            time(curve.median()),
            time(curve.quantile(0.99)),
        );
    }
    svg
}

fn line(axis: &Axis, curve: &Distribution, colour: &str) -> String {
    let mut points = String::new();
    for point in 0..=POINTS {
        let part = f64::from(point) / f64::from(POINTS);
        let (x, y) = (axis.place(curve.quantile(part)), height_of(part));
        // Writing to a string does not fail.
        let _written = write!(points, "{x:.1},{y:.1} ");
    }
    format!(
        "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>\n",
        points.trim_end()
    )
}
