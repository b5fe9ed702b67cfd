// SPDX-License-Identifier: Apache-2.0
//! Draws a comparison as a forest plot in SVG: a row for each key with its ratio and its interval,
//! on a logarithmic axis with a line at 1.

use std::fmt::Write;

use super::{Compared, Comparison};
use crate::report::escape;

const ROW: f64 = 20.0;
const TOP: f64 = 56.0;
const NAMES: f64 = 290.0;
const AXIS: f64 = 420.0;
const FIGURES: f64 = 170.0;
const MARGIN: f64 = 10.0;
/// The largest ratio on the axis; the smallest is its reciprocal. An interval that extends further
/// ends in an arrow.
const WIDEST: f64 = 1000.0;
/// The narrowest range of the axis, as the distance from 1.
const NARROWEST: f64 = 0.005;
/// The approximate number of marks on the axis.
const MARKS: f64 = 6.0;
/// The maximum length of a name. A longer name is truncated.
const LONGEST_NAME: usize = 40;

/// The axis: a range of ratios and its position.
struct Axis {
    low: f64,
    high: f64,
}

impl Axis {
    fn of(rows: &[(&Compared, f64, f64, f64)]) -> Self {
        let (mut low, mut high) = (1.0 - NARROWEST, 1.0 + NARROWEST);
        for &(_, ratio, from, to) in rows {
            for value in [ratio, from, to] {
                if (1.0 / WIDEST..=WIDEST).contains(&value) {
                    low = low.min(value);
                    high = high.max(value);
                }
            }
        }
        let room = (high / low).powf(0.04);
        Self {
            low: low / room,
            high: high * room,
        }
    }

    fn shows(&self, ratio: f64) -> bool {
        (self.low..=self.high).contains(&ratio)
    }

    /// Returns the horizontal position of a ratio, or of the nearest end of the axis.
    fn x(&self, ratio: f64) -> f64 {
        let ratio = ratio.clamp(self.low, self.high);
        MARGIN + NAMES + AXIS * (ratio / self.low).ln() / (self.high / self.low).ln()
    }

    /// Returns the ratios to mark: even steps, or 1, 2 and 5 times the powers of ten on a wide
    /// axis.
    #[allow(clippy::cast_possible_truncation)]
    fn marks(&self) -> Vec<f64> {
        let wide = self.high / self.low > 8.0;
        let mut marks = vec![];
        if wide {
            for power in -4..=4 {
                marks.extend([1.0, 2.0, 5.0].map(|digit| digit * 10f64.powi(power)));
            }
        } else {
            let rough = (self.high - self.low) / MARKS;
            let power = 10f64.powi(rough.log10().floor() as i32);
            let steps = [1.0, 2.0, 5.0, 10.0].map(|digit| digit * power);
            let step = steps.into_iter().find(|step| *step >= rough);
            let step = step.unwrap_or(rough);
            let first = ((self.low - 1.0) / step).ceil() as i32;
            let last = ((self.high - 1.0) / step).floor() as i32;
            marks.extend((first..=last).map(|at| 1.0 + f64::from(at) * step));
        }
        marks.retain(|mark| self.shows(*mark));
        marks
    }
}

/// Returns the plot. Keys without a result are not drawn.
pub fn forest(comparison: &Comparison) -> String {
    let rows: Vec<(&Compared, f64, f64, f64)> = comparison
        .keys
        .iter()
        .filter_map(|key| {
            let figures = key.figures.as_ref()?;
            let high = figures.high.unwrap_or(f64::INFINITY);
            Some((key, figures.ratio, figures.low, high))
        })
        .collect();
    let axis = Axis::of(&rows);
    let width = 2.0 * MARGIN + NAMES + AXIS + FIGURES;
    let bottom = TOP + ROW * rows.len() as f64;
    let height = bottom + 46.0;
    let mut svg = String::new();
    let _ = writeln!(
        svg,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" viewBox=\"0 0 \
         {width} {height}\" font-family=\"sans-serif\" font-size=\"12\">\n\
         <title>Ratio of the medians, key on to key off</title>\n\
         <rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n\
         <text x=\"{MARGIN}\" y=\"20\" font-size=\"14\" font-weight=\"bold\">{} with each key on, as a \
         ratio to key off</text>\n\
         <text x=\"{MARGIN}\" y=\"38\" fill=\"#555555\">{} confidence, seed {}; dark: a \
         difference was found{}</text>",
        escape(&comparison.measure),
        percent(comparison.confidence),
        comparison.seed,
        match comparison.ended_early {
            Some(_) => "; incomplete, because the comparison ended early",
            None => "",
        }
    );
    for mark in axis.marks() {
        let x = axis.x(mark);
        let _ = writeln!(
            svg,
            "<line x1=\"{x:.1}\" y1=\"{TOP}\" x2=\"{x:.1}\" y2=\"{bottom}\" stroke=\"#e4e4e4\"/>\n\
             <text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\" fill=\"#555555\">{}</text>",
            bottom + 16.0,
            short(mark)
        );
    }
    let one = axis.x(1.0);
    let _ = writeln!(
        svg,
        "<line x1=\"{one:.1}\" y1=\"{TOP}\" x2=\"{one:.1}\" y2=\"{bottom}\" stroke=\"#333333\" \
         stroke-dasharray=\"3 3\"/>\n\
         <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\" fill=\"#555555\">ratio of the medians, on / \
         off</text>",
        MARGIN + NAMES + AXIS / 2.0,
        bottom + 34.0
    );
    for (number, &(key, ratio, low, high)) in rows.iter().enumerate() {
        let y = TOP + ROW * (number as f64 + 0.5);
        row(&mut svg, &axis, y, key, (ratio, low, high));
    }
    svg.push_str("</svg>\n");
    svg
}

fn row(svg: &mut String, axis: &Axis, y: f64, key: &Compared, figures: (f64, f64, f64)) {
    let (ratio, low, high) = figures;
    let colour = match key.is_difference() {
        true => "#1f4e79",
        false => "#9a9a9a",
    };
    let mut name: String = key.name.chars().take(LONGEST_NAME).collect();
    if name.len() < key.name.len() {
        name.push('…');
    }
    let (from, to) = (axis.x(low), axis.x(high));
    let _ = writeln!(
        svg,
        "<text x=\"{MARGIN}\" y=\"{:.1}\">{}</text>\n\
         <line x1=\"{from:.1}\" y1=\"{y:.1}\" x2=\"{to:.1}\" y2=\"{y:.1}\" stroke=\"{colour}\" \
         stroke-width=\"2\"/>",
        y + 4.0,
        escape(&name)
    );
    for (limit, x, away) in [(low, from, -5.0), (high, to, 5.0)] {
        if !axis.shows(limit) {
            let _ = writeln!(
                svg,
                "<path d=\"M {:.1} {:.1} L {:.1} {y:.1} L {:.1} {:.1}\" fill=\"none\" \
                 stroke=\"{colour}\" stroke-width=\"2\"/>",
                x - away,
                y - 4.0,
                x,
                x - away,
                y + 4.0
            );
        }
    }
    if axis.shows(ratio) {
        let _ = writeln!(
            svg,
            "<rect x=\"{:.1}\" y=\"{:.1}\" width=\"8\" height=\"8\" fill=\"{colour}\"/>",
            axis.x(ratio) - 4.0,
            y - 4.0
        );
    }
    let high = match high.is_finite() {
        true => short(high),
        false => "∞".to_owned(),
    };
    let _ = writeln!(
        svg,
        "<text x=\"{:.1}\" y=\"{:.1}\" fill=\"{colour}\">{} [{}, {high}]</text>",
        MARGIN + NAMES + AXIS + 12.0,
        y + 4.0,
        short(ratio),
        short(low)
    );
}

/// Formats a number with four significant digits.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
pub fn short(number: f64) -> String {
    match number {
        0.0 => "0".to_owned(),
        _ if !number.is_finite() => "∞".to_owned(),
        _ if !(1e-4..1e6).contains(&number) => format!("{number:.3e}"),
        _ => {
            let decimals = (3.0 - number.log10().floor()).max(0.0) as usize;
            format!("{number:.decimals$}")
        }
    }
}

/// Formats a confidence, such as "95%" or "99.75%".
pub fn percent(confidence: f64) -> String {
    let percent = confidence * 100.0;
    let rounded = format!("{percent:.3}");
    // A level below 100% is never shown as 100%.
    let text = match rounded == "100.000" && confidence < 1.0 {
        true => "99.999".to_owned(),
        false => rounded,
    };
    let text = text.trim_end_matches('0').trim_end_matches('.');
    format!("{text}%")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::{Figures, Verdict};

    fn compared(
        name: &str,
        verdict: Verdict,
        figures: Option<(f64, f64, Option<f64>)>,
    ) -> Compared {
        Compared {
            name: name.to_owned(),
            result: verdict,
            why: String::new(),
            figures: figures.map(|(ratio, low, high)| Figures {
                ratio,
                low,
                high,
                ..Figures::default()
            }),
            measured: None,
        }
    }

    fn comparison(keys: Vec<Compared>) -> Comparison {
        Comparison {
            plot_failed: false,
            ended_early: None,
            seed: 7,
            confidence: 0.95,
            measure: "wall time < 5 & more".to_owned(),
            runs: 4,
            boots: 1,
            keys,
        }
    }

    /// Returns the values of an attribute of all elements with this name.
    fn attributes(svg: &str, element: &str, name: &str) -> Vec<f64> {
        let start = format!("<{element} ");
        let attribute = format!(" {name}=\"");
        svg.lines()
            .filter(|line| line.starts_with(&start))
            .filter_map(|line| {
                let rest = &line[line.find(&attribute)? + attribute.len()..];
                rest[..rest.find('"')?].parse().ok()
            })
            .collect()
    }

    #[test]
    fn every_key_with_a_result_has_a_row_in_the_picture() {
        let svg = forest(&comparison(vec![
            compared("slow", Verdict::Difference, Some((2.0, 1.5, Some(2.5)))),
            compared("<b>&", Verdict::NoDifference, Some((1.0, 0.9, Some(1.1)))),
            compared("open", Verdict::NoDifference, Some((1.0, 0.0, None))),
            compared("absent", Verdict::Failed, None),
        ]));
        assert!(svg.contains(">slow<") && svg.contains("2.000 [1.500, 2.500]"));
        assert!(svg.contains("&lt;b&gt;&amp;") && !svg.contains("<b>"));
        assert!(svg.contains("wall time &lt; 5 &amp; more"), "{svg}");
        assert!(
            svg.contains("1.000 [0, ∞]") && !svg.contains("absent"),
            "{svg}"
        );
        // An open interval ends in an arrow on each side.
        assert_eq!(svg.matches("<path ").count(), 2, "{svg}");
        assert_eq!(
            svg.matches("<text ").count(),
            svg.matches("</text>").count()
        );
        for (element, name) in [("line", "x1"), ("line", "x2"), ("rect", "x"), ("text", "x")] {
            for x in attributes(&svg, element, name) {
                assert!((0.0..=900.0).contains(&x), "{element} {name}={x}");
            }
        }
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
    }

    #[test]
    fn any_ratio_can_be_drawn() {
        for (ratio, low, high) in [
            (1e200, 1e-200, Some(1e200)),
            (1.0, 1.0, Some(1.0)),
            (0.5, 0.0001, Some(0.6)),
            (1.000_001, 1.000_000_9, Some(1.000_001_1)),
        ] {
            let svg = forest(&comparison(vec![compared(
                "a",
                Verdict::Difference,
                Some((ratio, low, high)),
            )]));
            assert!(
                !svg.contains("NaN") && !svg.contains("inf"),
                "{ratio}: {svg}"
            );
            assert!(svg.contains(">1.000<"), "{ratio}: {svg}");
        }
        assert!(forest(&comparison(vec![])).ends_with("</svg>\n"));
    }

    #[test]
    fn marks_are_few_and_inside() {
        for (low, high) in [(0.99, 1.01), (0.2, 1.3), (0.9, 4.0), (0.001, 900.0)] {
            let axis = Axis { low, high };
            let marks = axis.marks();
            assert!((3..20).contains(&marks.len()), "{low} {high}: {marks:?}");
            assert!(marks.iter().all(|mark| axis.shows(*mark)), "{marks:?}");
            assert!(axis.x(low) < axis.x(1.0) && axis.x(1.0) < axis.x(high));
        }
    }

    #[test]
    fn a_level_below_100_percent_is_not_shown_as_100() {
        for (level, shown) in [
            (0.95, "95%"),
            (0.9975, "99.75%"),
            (0.9999, "99.99%"),
            (0.999_999_9, "99.999%"),
            (1.0, "100%"),
        ] {
            assert_eq!(percent(level), shown);
        }
    }

    #[test]
    fn figures_are_short() {
        for (number, text) in [
            (1.0, "1.000"),
            (0.9, "0.9000"),
            (0.0, "0"),
            (0.001_234_56, "0.001235"),
            (12.34, "12.34"),
            (123_456.0, "123456"),
            (1e9, "1.000e9"),
            (1e-7, "1.000e-7"),
            (f64::INFINITY, "∞"),
        ] {
            assert_eq!(short(number), text);
        }
        assert_eq!([0.95, 0.9975, 0.5].map(percent), ["95%", "99.75%", "50%"]);
    }
}
