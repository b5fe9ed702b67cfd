// SPDX-License-Identifier: Apache-2.0
//! Manual pages and completions of the programs, made by the programs themselves when the packages are
//! built: only a program knows its whole command line.
#![deny(missing_docs)]
#![forbid(unsafe_code)]

use std::ffi::OsString;
use std::io;
use std::path::Path;

use clap::Command;
use clap_complete::Shell;

/// The first argument that asks a program for its manual; the second is a folder.
const ASK: &str = "--generate-manual";

const SHELLS: [Shell; 3] = [Shell::Bash, Shell::Zsh, Shell::Fish];

/// If this process was started with `--generate-manual FOLDER`, writes the manual pages and completions of
/// `program` there and ends the process. Call it first in `main`.
pub fn generate_if_asked(program: &'static str, command: fn() -> Command) {
    let arguments: Vec<OsString> = std::env::args_os().collect();
    let [_, ask, folder] = &arguments[..] else {
        return;
    };
    if ask != ASK {
        return;
    }
    if let Err(error) = generate(program, command(), Path::new(folder)) {
        eprintln!(
            "{program}: cannot write the manual to {}: {error}",
            Path::new(folder).display()
        );
        std::process::exit(1);
    }
    std::process::exit(0);
}

/// Writes `PROGRAM.1` and `PROGRAM-SUBCOMMAND.1`, and `PROGRAM.bash`, `PROGRAM.zsh` and `PROGRAM.fish`.
/// Hidden commands have no page.
///
/// # Errors
/// A file cannot be written.
pub fn generate(program: &'static str, command: Command, folder: &Path) -> io::Result<()> {
    // The derived name is that of the package.
    let mut command = command.name(program).bin_name(program);
    clap_mangen::generate_to(command.clone(), folder)?;
    for shell in SHELLS {
        let mut script = vec![];
        clap_complete::generate(shell, &mut command, program, &mut script);
        std::fs::write(folder.join(format!("{program}.{shell}")), script)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use clap::Arg;

    use super::*;

    fn command() -> Command {
        let get = Command::new("get").about("Gets").arg(Arg::new("KEY"));
        Command::new("the-package")
            .about("Does things")
            .version("1.2.3")
            .subcommand(Command::new("keys").about("Keys").subcommand(get))
            .subcommand(Command::new("secret").hide(true))
    }

    #[test]
    fn each_visible_command_has_a_page_and_each_shell_a_completion() {
        let folder = tempfile::tempdir().unwrap();
        generate("program", command(), folder.path()).unwrap();
        let mut names: Vec<String> = std::fs::read_dir(folder.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
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
        assert!(read("program.1").contains("program\\-keys(1)"));
        assert!(read("program.bash").contains("program__subcmd__keys__subcmd__get"));
    }

    #[test]
    fn a_missing_folder_is_an_error() {
        assert!(generate("program", command(), Path::new("/no/such/folder")).is_err());
    }
}
