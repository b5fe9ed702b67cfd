// SPDX-License-Identifier: Apache-2.0
//! Generates the manual pages and shell completions of all programs. Each program is started once
//! while the packages are built and generates its own files, because its command line is defined
//! only in its own code.
#![deny(missing_docs)]
#![forbid(unsafe_code)]

use std::any::TypeId;
use std::ffi::OsString;
use std::io::{self, IsTerminal};
use std::path::Path;
use std::time::Duration;

use clap::{Arg, Command};
use clap_complete::Shell;
use clap_complete::env::{CompleteEnv, Shells};

/// The first argument that requests a program's manual. The second argument is a folder.
const ASK: &str = "--generate-manual";

/// The environment variable with which a shell requests completions.
pub const COMPLETE: &str = "PATCHBAY_COMPLETE";

const SHELLS: [Shell; 3] = [Shell::Bash, Shell::Zsh, Shell::Fish];

/// A program that has a manual.
pub struct Program {
    /// The name under which the program is installed.
    pub name: &'static str,
    /// The program's command line.
    pub command: fn() -> Command,
    /// The program that starts this one to run its hidden commands. The manual pages of these
    /// commands are named after that program.
    pub front: Option<&'static str>,
}

impl Program {
    /// Handles two requests and then ends the process: a shell's request for completions, and the
    /// arguments `--generate-manual FOLDER`, which request the manual pages and completions in that
    /// folder. Returns if the process was started for neither. Call it first in `main`.
    pub fn answer_if_asked(&self) {
        CompleteEnv::with_factory(|| self.named(self.name))
            .var(COMPLETE)
            .complete();
        let arguments: Vec<OsString> = std::env::args_os().collect();
        let [_, ask, folder] = &arguments[..] else {
            return;
        };
        if ask != ASK {
            return;
        }
        if let Err(error) = self.generate(Path::new(folder)) {
            eprintln!(
                "{}: cannot write the manual to {}: {error}",
                self.name,
                Path::new(folder).display()
            );
            std::process::exit(1);
        }
        std::process::exit(0);
    }

    /// Writes `PROGRAM.1` and `PROGRAM-SUBCOMMAND.1`, and `PROGRAM.bash`, `PROGRAM.zsh` and
    /// `PROGRAM.fish`. The page of a hidden command is `FRONT-SUBCOMMAND.1` instead, with the name
    /// in [`Program::front`]. A command whose help is disabled starts another program, which writes
    /// that page itself.
    ///
    /// # Errors
    /// A file cannot be written.
    pub fn generate(&self, folder: &Path) -> io::Result<()> {
        for command in self.pages() {
            clap_mangen::Man::new(command).generate_to(folder)?;
        }
        for shell in SHELLS {
            let script = self.registration(shell, self.name)?;
            std::fs::write(folder.join(format!("{}.{shell}", self.name)), script)?;
        }
        Ok(())
    }

    /// Returns the script with which a shell requests completions from this program. The script
    /// calls the program by name if it was started by name, otherwise by its path.
    ///
    /// # Errors
    /// The program's own path cannot be found.
    pub fn completion(&self, shell: Shell) -> io::Result<String> {
        let own = std::env::args_os().next().unwrap_or_default();
        match own.as_encoded_bytes().contains(&b'/') {
            true => self.registration(shell, &std::env::current_exe()?.to_string_lossy()),
            false => self.registration(shell, self.name),
        }
    }

    fn registration(&self, shell: Shell, program: &str) -> io::Result<String> {
        let shells = Shells::builtins();
        let shell = shells.completer(&shell.to_string());
        let shell = shell.ok_or_else(|| io::Error::other("the shell is not supported"))?;
        let mut script = vec![];
        shell.write_registration(COMPLETE, self.name, self.name, program, &mut script)?;
        Ok(String::from_utf8_lossy(&script).into_owned())
    }

    /// Returns the commands that have a page, with all their options.
    fn pages(&self) -> Vec<Command> {
        let mut pages = vec![];
        let mut whole = self.named(self.name).disable_help_subcommand(true);
        whole.build();
        add_visible(&whole, &mut pages);
        if let Some(front) = self.front {
            let mut whole = self.named(front).disable_help_subcommand(true);
            for command in whole.get_subcommands_mut() {
                *command = command.clone().hide(!command.is_hide_set());
            }
            whole.build();
            for command in whole.get_subcommands() {
                add_visible(command, &mut pages);
            }
        }
        pages
    }

    /// Returns the command line, named `name`. clap's default is the name of the package, which
    /// differs.
    fn named(&self, name: &'static str) -> Command {
        (self.command)().name(name).bin_name(name)
    }

    /// Returns the file names of the manual pages.
    #[must_use]
    pub fn page_names(&self) -> Vec<String> {
        let pages = self.pages().into_iter();
        pages
            .map(|command| clap_mangen::Man::new(command).get_filename())
            .collect()
    }

    /// Returns the options that are missing from their page, as "PAGE OPTION". A test of each
    /// program checks that there are none.
    #[must_use]
    pub fn missing_options(&self) -> Vec<String> {
        let pages = self.pages().into_iter();
        pages
            .flat_map(|page| missing_from(&page, &text_of(&page)))
            .collect()
    }

    /// Returns the options and arguments that take a number or a time and whose help names no
    /// range, as "PAGE OPTION". A test of each program checks that there are none.
    #[must_use]
    pub fn without_range(&self) -> Vec<String> {
        let pages = self.pages().into_iter();
        pages.flat_map(|page| without_range(&page)).collect()
    }
}

fn without_range(page: &Command) -> Vec<String> {
    let name = clap_mangen::Man::new(page.clone()).get_filename();
    let numbers = [
        TypeId::of::<u8>(),
        TypeId::of::<u16>(),
        TypeId::of::<u32>(),
        TypeId::of::<u64>(),
        TypeId::of::<usize>(),
        TypeId::of::<i64>(),
        TypeId::of::<f64>(),
        TypeId::of::<Duration>(),
    ];
    let is_number = |argument: &&Arg| {
        let id = argument.get_value_parser().type_id();
        argument.get_action().takes_values() && numbers.iter().any(|number| id == *number)
    };
    let shown = page.get_arguments().filter(|one| !one.is_hide_set());
    shown
        .filter(is_number)
        .filter(|argument| {
            let help = argument.get_help().map(ToString::to_string);
            !names_a_range(&help.unwrap_or_default())
        })
        .map(|argument| format!("{name} {}", argument.get_id()))
        .collect()
}

/// Returns whether a help text contains a range such as "1 to 16" or "1ms to 1h".
fn names_a_range(help: &str) -> bool {
    let is_number = |word: &str| word.starts_with(|c: char| c.is_ascii_digit());
    let words: Vec<&str> = help.split_whitespace().collect();
    let mut ranges = words.windows(3);
    ranges.any(|words| is_number(words[0]) && words[1] == "to" && is_number(words[2]))
}

/// Returns whether lines on standard error may be coloured: standard error is a terminal, and
/// NO_COLOR (<https://no-color.org>) is not set.
#[must_use]
pub fn stderr_takes_colours() -> bool {
    let refused = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    !refused && std::io::stderr().is_terminal()
}

/// Returns the page as roff, with plain hyphens.
fn text_of(page: &Command) -> String {
    let mut text = vec![];
    clap_mangen::Man::new(page.clone())
        .render(&mut text)
        .expect("a vector takes every write");
    String::from_utf8_lossy(&text).replace("\\-", "-")
}

fn missing_from(page: &Command, text: &str) -> Vec<String> {
    let name = clap_mangen::Man::new(page.clone()).get_filename();
    let options = page.get_arguments().filter(|one| !one.is_hide_set());
    options
        .filter_map(|option| option.get_long())
        .filter(|option| !text.contains(&format!("\\fB--{option}\\fR")))
        .map(|option| format!("{name} --{option}"))
        .collect()
}

fn add_visible(command: &Command, pages: &mut Vec<Command>) {
    if command.is_hide_set() || command.is_disable_help_flag_set() && !has_help(command) {
        return;
    }
    pages.push(command.clone());
    for command in command.get_subcommands() {
        add_visible(command, pages);
    }
}

fn has_help(command: &Command) -> bool {
    command
        .get_arguments()
        .any(|argument| argument.get_long() == Some("help"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn command() -> Command {
        let get = Command::new("get")
            .about("Gets")
            .arg(Arg::new("KEY"))
            .arg(Arg::new("at").long("at").help("When"));
        let check = Command::new("check").arg(Arg::new("strict").long("strict"));
        let other = Arg::new("WORD").trailing_var_arg(true).num_args(0..);
        Command::new("the-package")
            .about("Does things")
            .version("1.2.3")
            .subcommand(Command::new("keys").about("Keys").subcommand(get))
            .subcommand(Command::new("secret").hide(true).subcommand(check))
            .subcommand(Command::new("other").arg(other).disable_help_flag(true))
    }

    fn program(front: Option<&'static str>) -> Program {
        Program {
            name: "program",
            command,
            front,
        }
    }

    fn generated(program: &Program) -> (tempfile::TempDir, Vec<String>) {
        let folder = tempfile::tempdir().unwrap();
        program.generate(folder.path()).unwrap();
        let mut names: Vec<String> = std::fs::read_dir(folder.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        (folder, names)
    }

    #[test]
    fn each_visible_command_has_a_page_and_each_shell_a_completion() {
        let (folder, names) = generated(&program(None));
        assert_eq!(
            names,
            [
                "program-keys-get.1",
                "program-keys.1",
                "program.1",
                "program.bash",
                "program.fish",
                "program.zsh"
            ]
        );
        let read = |name: &str| std::fs::read_to_string(folder.path().join(name)).unwrap();
        let page = read("program-keys-get.1");
        assert!(
            page.contains(".SH SYNOPSIS") && page.contains("KEY"),
            "{page}"
        );
        let page = read("program.1");
        assert!(page.contains("program\\-keys(1)"), "{page}");
        assert!(page.contains("program\\-other(1)"), "{page}");
        for shell in ["bash", "fish", "zsh"] {
            let script = read(&format!("program.{shell}"));
            assert!(script.contains("PATCHBAY_COMPLETE"), "{script}");
        }
    }

    #[test]
    fn hidden_commands_have_pages_under_the_name_of_the_program_in_front() {
        let (folder, names) = generated(&program(Some("front")));
        let pages: Vec<&String> = names.iter().filter(|name| name.ends_with(".1")).collect();
        assert_eq!(
            pages,
            [
                "front-secret-check.1",
                "front-secret.1",
                "program-keys-get.1",
                "program-keys.1",
                "program.1"
            ]
        );
        let page = std::fs::read_to_string(folder.path().join("front-secret-check.1")).unwrap();
        assert!(page.contains("\\fBfront secret check\\fR"), "{page}");
        assert!(page.contains("\\-\\-strict"), "{page}");
    }

    #[test]
    fn a_page_that_lacks_an_option_is_found() {
        let program = program(Some("front"));
        assert_eq!(program.missing_options(), Vec::<String>::new());
        let page = program.pages().pop().expect("the last one");
        // clap_mangen leaves out what it does not support.
        let text = text_of(&page).replace("strict", "");
        assert_eq!(
            missing_from(&page, &text),
            ["front-secret-check.1 --strict"]
        );
    }

    #[test]
    fn a_number_without_a_range_is_found() {
        let count = |help: &'static str| {
            let count = Arg::new("count").long("count").help(help);
            let count = count.value_parser(clap::value_parser!(u32));
            without_range(&Command::new("program").arg(count))
        };
        for help in ["", "How many", "At most 5", "From 1 to many"] {
            assert_eq!(count(help), ["program.1 count"], "{help}");
        }
        for help in [
            "How many, 1 to 16.",
            "How long, 1ms to 1h; 30s unless given.",
        ] {
            assert!(count(help).is_empty(), "{help}");
        }
        let words = Command::new("program").arg(Arg::new("word").long("word"));
        assert!(without_range(&words).is_empty());
    }

    #[test]
    fn a_missing_folder_is_an_error() {
        assert!(
            program(None)
                .generate(Path::new("/no/such/folder"))
                .is_err()
        );
    }
}
