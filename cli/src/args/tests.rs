// SPDX-License-Identifier: Apache-2.0

use clap::CommandFactory;

use super::*;

#[test]
fn command_line_is_consistent() {
    Cli::command().debug_assert();
}

/// Each code in the help is one that a command can end with.
#[test]
fn the_help_lists_every_exit_code() {
    use crate::failure::{ERROR, GATE, PARTLY, TIMEOUT, USAGE};
    let listed: Vec<u8> = EXIT_CODES
        .lines()
        .skip(1)
        .filter_map(|line| line.split_whitespace().next()?.parse().ok())
        .collect();
    assert_eq!(listed, [0, ERROR, USAGE, PARTLY, GATE, TIMEOUT]);
}

/// A consent has one meaning, and its help the same words wherever it stands.
#[test]
fn each_consent_is_described_alike_everywhere() {
    fn visit(command: &clap::Command, found: &mut Vec<(String, String, String)>) {
        for argument in command.get_arguments().filter(|arg| !arg.is_hide_set()) {
            let name = argument.get_long().unwrap_or_default();
            if ["force", "allow-guarded", "even-if-others"].contains(&name) {
                let help = argument.get_help().map(ToString::to_string);
                let verb = command.get_name().to_owned();
                found.push((name.to_owned(), help.unwrap_or_default(), verb));
            }
        }
        for subcommand in command.get_subcommands() {
            visit(subcommand, found);
        }
    }
    let mut found = vec![];
    visit(&Cli::command(), &mut found);
    for (name, help, verb) in &found {
        let (_, first, _) = found.iter().find(|(other, ..)| other == name).expect("one");
        assert_eq!(help, first, "--{name} of {verb}");
    }
    assert!(found.len() > 12, "{found:?}");
}

#[test]
fn the_same_option_names_a_format_or_a_recording() {
    let parse = |words: &[&str]| Cli::try_parse_from([&["patchbay"], words].concat());
    let format = |words: &[&str]| parse(words).map(|cli| cli.output.format()).ok();
    assert_eq!(format(&["guest", "list"]), Some(Output::Table));
    assert_eq!(format(&["-o", "json", "trace", "stat"]), Some(Output::Json));
    assert_eq!(format(&["trace", "stat", "-oname"]), Some(Output::Name));
    assert_eq!(format(&["trace", "stat", "-o", "t.json"]), None);
    for words in [
        &["trace", "record", "-o", "json"][..],
        &["-o", "yaml", "trace", "record", "x", "--output=json"],
    ] {
        let cli = parse(words).expect("a recording");
        assert_eq!(cli.output.format(), Output::Table);
        let Command::Trace(TraceCommand::Record { output, .. }) = cli.command else {
            panic!("{words:?}")
        };
        assert!(matches!(output, OutputArgument::File(path) if path == *"json"));
    }
    assert!(parse(&["trace", "record"]).is_err());
    assert!(parse(&["-o", "json", "trace", "record"]).is_err());
}

#[test]
fn times_have_units() {
    assert_eq!(parse_duration("10ms"), Ok(Duration::from_millis(10)));
    assert_eq!(parse_duration("2h"), Ok(Duration::from_secs(7200)));
    for bad in [
        "",
        "5",
        "ms",
        "-1s",
        "1.5s",
        "1w",
        "0s",
        "99999999999999999999s",
        "9999999999999999d",
    ] {
        assert!(parse_duration(bad).is_err(), "{bad:?}");
    }
}
