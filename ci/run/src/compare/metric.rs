// SPDX-License-Identifier: Apache-2.0
//! Reads the measurement from the output of a run.

use regex::{Regex, RegexBuilder};

use crate::runner::WHOLE;

/// The limits of a measurement, which keep ratios of medians finite.
const SMALLEST: f64 = 1e-100;
const LARGEST: f64 = 1e100;
/// The number of characters of the output that an error shows.
const SHOWN: usize = 40;

/// A regular expression whose only group is the measurement.
#[derive(Clone, Debug)]
pub struct Metric(Regex);

impl Metric {
    /// Compiles the expression. `^` and `$` match at the start and end of each line.
    ///
    /// # Errors
    /// The expression is malformed, or it has no group or several.
    pub fn parse(text: &str) -> Result<Self, String> {
        let regex = RegexBuilder::new(text).multi_line(true).build();
        let regex = regex.map_err(|error| error.to_string())?;
        match regex.captures_len() - 1 {
            1 => Ok(Self(regex)),
            0 => Err(
                "the expression has no group; put the number in parentheses, as in 'took (\\S+) us'"
                    .to_owned(),
            ),
            groups => Err(format!(
                "the expression has {groups} groups and needs exactly one, the number; write (?:…) \
                 for the others"
            )),
        }
    }

    /// Returns the text of the expression.
    pub fn text(&self) -> &str {
        self.0.as_str()
    }

    /// Returns the number that the group matches in a run's output. `cut` is true if `output` lacks
    /// its beginning.
    ///
    /// # Errors
    /// The output is cut, the expression does not match exactly once, or the group is not a
    /// positive number.
    pub fn measure(&self, output: &str, cut: bool) -> Result<f64, String> {
        // The part that was dropped may contain the number, or a second match.
        if cut {
            return Err(format!(
                "the output exceeds {} KiB, so --metric cannot search all of it; print less, or \
                 write to a file",
                WHOLE >> 10
            ));
        }
        self.find(output)
    }

    fn find(&self, output: &str) -> Result<f64, String> {
        let mut found = self.0.captures_iter(output);
        let Some(first) = found.next() else {
            return Err("its output does not match --metric".to_owned());
        };
        if let more @ 1.. = found.count() {
            return Err(format!(
                "its output matches --metric {} times; make the expression match once",
                more + 1
            ));
        }
        let text = first.get(1).map_or("", |group| group.as_str());
        let shown: String = text.chars().take(SHOWN).collect();
        let Ok(number) = text.trim().parse::<f64>() else {
            return Err(format!("--metric matches {shown:?}, which is no number"));
        };
        in_range(number).ok_or_else(|| {
            format!("--metric matches {shown:?}; a ratio needs a number from 1e-100 to 1e100")
        })
    }
}

/// Returns the number if it is within the limits; otherwise `None`.
pub fn in_range(number: f64) -> Option<f64> {
    (SMALLEST..=LARGEST).contains(&number).then_some(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_group_is_required() {
        Metric::parse(r"(?:took|used) (\d+)").unwrap();
        for (bad, why) in [
            ("took", "no group"),
            ("(?:took)", "no group"),
            (r"(\d+) of (\d+)", "2 groups"),
            ("(", "unclosed group"),
            (r"(\d{1000000000})", "exceeds"),
            ("", "no group"),
        ] {
            let error = Metric::parse(bad).unwrap_err();
            assert!(error.contains(why), "{bad}: {error}");
        }
    }

    #[test]
    fn exactly_one_positive_number_is_a_measurement() {
        let metric = Metric::parse(r"^ns: *(\S*)$").unwrap();
        for (output, number) in [
            ("ns: 12.5", 12.5),
            ("first\nns:1e3\nlast\n", 1000.0),
            ("ns: +7\n", 7.0),
        ] {
            assert_eq!(metric.find(output), Ok(number), "{output}");
        }
        for (output, why) in [
            ("", "does not match"),
            ("us: 3", "does not match"),
            ("ns: 1\nns: 1\nns: 1\n", "3 times"),
            ("ns: 1,5", "\"1,5\", which is no number"),
            ("ns:", "no number"),
            ("ns: NaN", "1e-100 to"),
            ("ns: inf", "1e-100 to"),
            ("ns: -infinity", "1e-100 to"),
            ("ns: 0", "1e-100 to"),
            ("ns: -3", "1e-100 to"),
            ("ns: 1e300", "1e-100 to"),
            ("ns: 1e-300", "1e-100 to"),
            ("ns: 1e999", "1e-100 to"),
        ] {
            let error = metric.find(output).unwrap_err();
            assert!(error.contains(why), "{output}: {error}");
        }
        let long = format!("ns: {}", "x".repeat(100_000));
        assert!(metric.find(&long).unwrap_err().len() < 200);
    }

    #[test]
    fn an_output_without_its_beginning_is_not_searched() {
        let metric = Metric::parse(r"took (\d+)").unwrap();
        assert_eq!(metric.measure("took 5", false), Ok(5.0));
        let error = metric.measure("took 5", true).unwrap_err();
        assert!(error.contains("exceeds 512 KiB"), "{error}");
    }

    #[test]
    fn a_group_that_takes_no_part_is_no_number() {
        let metric = Metric::parse(r"done( \d+)?").unwrap();
        assert_eq!(metric.find("done 5"), Ok(5.0));
        assert!(metric.find("done").unwrap_err().contains("no number"));
    }
}
