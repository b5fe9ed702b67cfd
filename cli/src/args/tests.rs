// SPDX-License-Identifier: Apache-2.0

use clap::CommandFactory;

use super::*;
use crate::args::output::Output;
use crate::args::times::parse_duration;

#[test]
fn command_line_is_consistent() {
    Cli::command().debug_assert();
}

/// Checks that the help lists exactly the exit codes that commands return.
#[test]
fn the_help_lists_every_exit_code() {
    use crate::failure::{DRIFT, ERROR, GATE, PARTLY, TIMEOUT, USAGE};
    let listed: Vec<u8> = EXIT_CODES
        .lines()
        .skip(1)
        .filter_map(|line| line.split_whitespace().next()?.parse().ok())
        .collect();
    assert_eq!(listed, [0, ERROR, USAGE, PARTLY, DRIFT, GATE, TIMEOUT]);
}

/// Checks that an option such as --force has the same help text in every command.
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

#[test]
fn a_change_that_takes_no_references_refuses_a_limit_of_their_life() {
    let check = |words: &[&str]| {
        let words = ["patchbay"].iter().chain(words).chain(&["--ttl", "10m"]);
        Cli::try_parse_from(words).expect("well-formed").check()
    };
    for verb in [["keys", "disable"], ["keys", "dec"], ["debug", "off"]] {
        let said = check(&[&verb[..], &["x"]].concat()).expect_err("no references");
        let verb = verb.join(" ");
        assert!(said.contains(&format!("`patchbay {verb}`")), "{said}");
        assert!(said.contains("--ttl"), "{said}");
    }
    for verb in [["keys", "enable"], ["keys", "inc"], ["debug", "on"]] {
        assert_eq!(check(&[&verb[..], &["x"]].concat()), Ok(()));
    }
}

/// Checks that every option that takes a time refuses a negative one as a time.
#[test]
fn a_negative_time_is_not_taken_for_an_option() {
    fn visit(command: &clap::Command, path: &[String], seen: &mut usize) {
        let times = command
            .get_arguments()
            .filter(|one| one.get_value_parser().type_id() == std::any::TypeId::of::<Duration>());
        for option in times.filter_map(|time| time.get_long()) {
            let words = ["--".to_owned() + option, "-5s".to_owned()];
            let said = Cli::try_parse_from(path.iter().chain(&words));
            let said = said.expect_err("a negative time").to_string();
            let expected = format!("invalid value '-5s' for '--{option} <TIME>'");
            assert!(said.contains(&expected), "{path:?} --{option}: {said}");
            *seen += 1;
        }
        for subcommand in command.get_subcommands() {
            let path = [path, &[subcommand.get_name().to_owned()]].concat();
            visit(subcommand, &path, seen);
        }
    }
    let mut seen = 0;
    visit(&Cli::command(), &["patchbay".to_owned()], &mut seen);
    assert!(seen > 20, "{seen}");
}

/// Splits a line as a shell does: blanks separate words, quotes join them, ` #` begins a comment.
fn words(line: &str) -> Vec<String> {
    let line = line.split(" #").next().unwrap_or_default();
    let (mut words, mut quote) = (vec![String::new()], None);
    for c in line.chars() {
        let last = words.len() - 1;
        match quote {
            Some(end) if c == end => quote = None,
            None if c == '\'' || c == '"' => quote = Some(c),
            None if c == ' ' => words.push(String::new()),
            _ => words[last].push(c),
        }
    }
    words.retain(|word| !word.is_empty());
    words
}

/// Checks that no document shows a command that the command line refuses.
#[test]
fn every_command_in_the_documents_is_understood() {
    const DOCUMENTS: [&str; 5] = [
        include_str!("../../../docs/walk.md"),
        include_str!("../../../docs/service.md"),
        include_str!("../../../docs/tracing.md"),
        include_str!("../../../examples/getppid/README.md"),
        include_str!("../../../examples/trace/README.md"),
    ];
    let mut commands = 0;
    for line in DOCUMENTS.iter().flat_map(|document| document.lines()) {
        let line = line.trim().trim_start_matches("$ ");
        if !line.starts_with("patchbay ") {
            continue;
        }
        // Only the left side of a pipe is checked, without a redirection.
        let line = line.split(['|', '>']).next().unwrap_or_default();
        let parsed = Cli::try_parse_from(words(line));
        assert!(parsed.is_ok(), "{line}: {}", parsed.unwrap_err());
        assert!(!is_old(&parsed.unwrap().command), "{line}: an old spelling");
        commands += 1;
    }
    assert!(commands > 30, "{commands}");
}

fn is_old(command: &Command) -> bool {
    matches!(
        command,
        Command::Run(_)
            | Command::Guests { .. }
            | Command::Console(_)
            | Command::Keys(KeysCommand::Holds(_))
    )
}
