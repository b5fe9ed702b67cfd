// SPDX-License-Identifier: Apache-2.0
//! Writes results of runs as JUnit XML and KTAP.

use std::fmt::Write;
use std::time::Duration;

use crate::cases::Cases;

/// The name of the test case that stands for what is missing after an early end.
const MISSING: &str = "the rest of the run";

/// The verdict on one case.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    Passed,
    /// The reason for the failure.
    Failed(String),
    /// The reason why the case was not run.
    Skipped(String),
}

/// One run of the command.
#[derive(Clone, Debug)]
pub struct Case {
    pub name: String,
    pub verdict: Verdict,
    pub time: Duration,
    /// The command's output and the kernel's reports.
    pub output: String,
    /// The output was too long, and `output` lacks its beginning.
    pub cut: bool,
}

impl Case {
    pub fn failed(&self) -> bool {
        matches!(self.verdict, Verdict::Failed(_))
    }
}

/// Returns a JUnit report with one suite. If the run ended early, the last test case stands for
/// what is missing, and has an error.
pub fn junit(suite: &str, cases: &Cases) -> String {
    let known = cases.known();
    let time: Duration = known.iter().map(|case| case.time).sum();
    let errors = usize::from(cases.ended_early().is_some());
    let mut xml = String::from("<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n");
    let _ = writeln!(
        xml,
        "<testsuites>\n  <testsuite name=\"{}\" tests=\"{}\" failures=\"{}\" skipped=\"{}\" errors=\"{errors}\" time=\"{:.3}\">",
        escape(suite),
        known.len() + errors,
        cases.count(|verdict| matches!(verdict, Verdict::Failed(_))),
        cases.count(|verdict| matches!(verdict, Verdict::Skipped(_))),
        time.as_secs_f64(),
    );
    for case in known {
        let _ = writeln!(
            xml,
            "    <testcase classname=\"{}\" name=\"{}\" time=\"{:.3}\">",
            escape(suite),
            escape(&case.name),
            case.time.as_secs_f64()
        );
        let _ = match &case.verdict {
            Verdict::Passed => Ok(()),
            Verdict::Failed(why) => writeln!(xml, "      <failure message=\"{}\"/>", escape(why)),
            Verdict::Skipped(why) => writeln!(xml, "      <skipped message=\"{}\"/>", escape(why)),
        };
        if !case.output.is_empty() {
            let _ = writeln!(
                xml,
                "      <system-out>{}</system-out>",
                escape(&case.output)
            );
        }
        xml.push_str("    </testcase>\n");
    }
    if let Some(why) = cases.ended_early() {
        let _ = writeln!(
            xml,
            "    <testcase classname=\"{}\" name=\"{MISSING}\" time=\"0.000\">\n      <error message=\"{}\"/>\n    </testcase>",
            escape(suite),
            escape(why)
        );
    }
    xml.push_str("  </testsuite>\n</testsuites>\n");
    xml
}

/// Escapes text for XML 1.0. Control characters are replaced, because XML 1.0 does not allow them
/// even in escaped form.
pub fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '&' => escaped.push_str("&amp;"),
            '"' => escaped.push_str("&quot;"),
            '\n' => escaped.push_str("&#10;"),
            '\t' => escaped.push(c),
            '\u{fffe}' | '\u{ffff}' => escaped.push('\u{fffd}'),
            c if c.is_control() => escaped.push('\u{fffd}'),
            c => escaped.push(c),
        }
    }
    escaped
}

/// Returns a KTAP document (Documentation/dev-tools/ktap.rst). If the run ended early, the plan has
/// the number of all cases, and the last line is TAP's "Bail out!", as in the kernel's selftests.
pub fn ktap(cases: &Cases) -> String {
    let mut text = format!("KTAP version 1\n1..{}\n", cases.planned());
    for (number, case) in cases.known().iter().enumerate() {
        for line in case.output.lines() {
            let _ = writeln!(text, "# {}", one_line(line));
        }
        // "#" begins a directive.
        let name = one_line(&case.name).replace('#', "_");
        let number = number + 1;
        let _ = match &case.verdict {
            Verdict::Passed => writeln!(text, "ok {number} {name}"),
            Verdict::Failed(why) => {
                writeln!(text, "# {}\nnot ok {number} {name}", one_line(why))
            }
            Verdict::Skipped(why) => writeln!(text, "ok {number} {name} # SKIP {}", one_line(why)),
        };
    }
    if let Some(why) = cases.ended_early() {
        let _ = writeln!(text, "Bail out! {}", one_line(why));
    }
    text
}

fn one_line(text: &str) -> String {
    text.chars()
        .map(|c| if c.is_control() { ' ' } else { c })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cases() -> Cases {
        let case = |name: &str, verdict, output: &str| Case {
            name: name.to_owned(),
            verdict,
            time: Duration::from_millis(1500),
            output: output.to_owned(),
            cut: false,
        };
        let mut cases = Cases::default();
        cases.plan(7);
        for case in [
            case("no key flipped", Verdict::Passed, "fine\n"),
            case(
                "a<b>=on # \"x\"",
                Verdict::Failed("exit status 1\nno".into()),
                "a & b ]]> \x1b[31m\0\nok 9 faked",
            ),
            case("c=off", Verdict::Skipped("sealed".into()), ""),
        ] {
            cases.add(case);
        }
        cases
    }

    #[test]
    fn junit_is_well_formed_whatever_the_output() {
        let xml = junit("test -x", &cases());
        assert!(
            xml.contains("tests=\"3\" failures=\"1\" skipped=\"1\" errors=\"0\" time=\"4.500\""),
            "{xml}"
        );
        assert!(
            xml.contains("name=\"a&lt;b&gt;=on # &quot;x&quot;\""),
            "{xml}"
        );
        assert!(xml.contains("<system-out>a &amp; b ]]&gt; "), "{xml}");
        assert!(xml.contains("<skipped message=\"sealed\"/>"), "{xml}");
        assert!(
            !xml.contains(|c: char| c.is_control() && c != '\n'),
            "{xml:?}"
        );
        assert_eq!(
            xml.matches("<testcase ").count(),
            xml.matches("</testcase>").count()
        );
    }

    #[test]
    fn ktap_has_a_plan_and_output_cannot_fake_results() {
        let text = ktap(&cases());
        let results: Vec<&str> = text
            .lines()
            .filter(|line| !line.starts_with("# "))
            .collect();
        assert_eq!(
            results,
            [
                "KTAP version 1",
                "1..3",
                "ok 1 no key flipped",
                "not ok 2 a<b>=on _ \"x\"",
                "ok 3 c=off # SKIP sealed",
            ]
        );
        assert!(
            text.contains("\n# ok 9 faked\n# exit status 1 no\n"),
            "{text}"
        );
    }

    #[test]
    fn an_early_end_is_in_every_report() {
        let mut cases = cases();
        let error = anyhow::anyhow!("the guest's console ends with:\n\"x\"\0");
        cases.end_early(error.into()).unwrap();
        let xml = junit("test -x", &cases);
        assert!(
            xml.contains("tests=\"4\" failures=\"1\" skipped=\"1\" errors=\"1\" "),
            "{xml}"
        );
        let message = "the run ended early, after 3 of 7 cases: the guest's console ends with:\
                       &#10;&quot;x&quot;\u{fffd}";
        assert!(
            xml.contains(&format!("      <error message=\"{message}\"/>\n")),
            "{xml}"
        );
        let text = ktap(&cases);
        assert!(text.starts_with("KTAP version 1\n1..7\n"), "{text}");
        let last = "Bail out! the run ended early, after 3 of 7 cases: the guest's console ends \
                    with: \"x\" \n";
        assert!(text.ends_with(last), "{text}");
        assert_eq!(cases.status(), crate::UNABLE);
    }
}
