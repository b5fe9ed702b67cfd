// SPDX-License-Identifier: Apache-2.0
//! Function names for site addresses, from the kernel's own symbol table.
//!
//! The guest does not send its symbols. An operator may give the monitor the kernel's `System.map`
//! or `vmlinux`. The file is not checked against the guest: a wrong file gives wrong names and does
//! no other harm.

use std::path::Path;

use object::{Object, ObjectSymbol, SymbolKind};

/// Maximum file size: a vmlinux with debug information has about 400 MiB.
const MAX_FILE_BYTES: u64 = 2 << 30;

/// The reason why symbols could not be read.
#[derive(Debug, thiserror::Error)]
pub enum SymbolsError {
    /// An I/O error.
    #[error("symbol file {path} cannot be read: {error}")]
    Unreadable {
        /// Path of the file.
        path: String,
        /// The error.
        error: std::io::Error,
    },
    /// The file is too large for a kernel.
    #[error("symbol file {path} has more than 2 GiB; give the kernel's System.map instead")]
    TooLarge {
        /// Path of the file.
        path: String,
    },
    /// The file is in neither of the two formats.
    #[error(
        "symbol file {path} is neither a System.map nor an ELF file with a symbol table; give one of them"
    )]
    NoSymbols {
        /// Path of the file.
        path: String,
    },
}

/// Text symbols by link-time address.
#[derive(Debug, Default)]
pub struct Symbols {
    sorted: Vec<(u64, Box<str>)>,
}

impl Symbols {
    /// Reads a `System.map` or an ELF file.
    ///
    /// # Errors
    /// [`SymbolsError`].
    pub fn read(path: &Path) -> Result<Self, SymbolsError> {
        let name = path.display().to_string();
        let unreadable = |error| SymbolsError::Unreadable {
            path: name.clone(),
            error,
        };
        if std::fs::metadata(path).map_err(unreadable)?.len() > MAX_FILE_BYTES {
            return Err(SymbolsError::TooLarge { path: name });
        }
        let bytes = std::fs::read(path).map_err(unreadable)?;
        let symbols = if bytes.starts_with(b"\x7fELF") {
            Self::from_elf(&bytes)
        } else {
            Self::from_map(&bytes)
        };
        if symbols.sorted.is_empty() {
            return Err(SymbolsError::NoSymbols { path: name });
        }
        Ok(symbols)
    }

    /// Returns the text symbols of an ELF image. Returns none if the image is stripped or
    /// malformed.
    pub fn from_elf(bytes: &[u8]) -> Self {
        let Ok(file) = object::File::parse(bytes) else {
            return Self::default();
        };
        let text = file
            .symbols()
            .filter(|symbol| symbol.kind() == SymbolKind::Text)
            .filter_map(|symbol| Some((symbol.address(), symbol.name().ok()?)));
        Self::from_pairs(text)
    }

    /// Returns the symbols of types t, T, w and W of a `System.map`. Malformed lines are skipped.
    pub fn from_map(bytes: &[u8]) -> Self {
        let text = bytes.split(|&byte| byte == b'\n').filter_map(|line| {
            let mut words = std::str::from_utf8(line).ok()?.split_ascii_whitespace();
            let address = u64::from_str_radix(words.next()?, 16).ok()?;
            let kind = words.next()?;
            matches!(kind, "t" | "T" | "w" | "W").then_some((address, words.next()?))
        });
        Self::from_pairs(text)
    }

    fn from_pairs<'a>(pairs: impl Iterator<Item = (u64, &'a str)>) -> Self {
        let mut sorted: Vec<(u64, Box<str>)> = pairs
            .filter(|(_, name)| !name.is_empty())
            .map(|(address, name)| (address, name.into()))
            .collect();
        sorted.sort_unstable();
        // Chooses the alphabetically first of several aliases.
        sorted.dedup_by_key(|(address, _)| *address);
        Self { sorted }
    }

    /// Returns "function+0x1f" for a link-time address, or "" if no symbol lies at or below the
    /// address.
    pub fn name(&self, address: u64) -> String {
        let after = self.sorted.partition_point(|(start, _)| *start <= address);
        match after
            .checked_sub(1)
            .and_then(|index| self.sorted.get(index))
        {
            Some((start, name)) => format!("{name}+{:#x}", address - start),
            None => String::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAP: &[u8] =
        b"ffffffff81000000 T _stext\nffffffff81000010 t helper\nffffffff81000010 T alias\n\
        ffffffff82000000 D data\nnot a line\n";

    #[test]
    fn map_names_functions_and_offsets() {
        let symbols = Symbols::from_map(MAP);
        assert_eq!(symbols.name(0xffff_ffff_8100_0000), "_stext+0x0");
        assert_eq!(symbols.name(0xffff_ffff_8100_0015), "alias+0x5");
        assert_eq!(symbols.name(0xffff_ffff_80ff_ffff), "");
    }

    /// The test program itself is an ELF file with a symbol table.
    #[test]
    fn elf_symbols_are_read() {
        let path = std::env::current_exe().expect("a test program");
        let symbols = Symbols::read(&path).expect("symbols");
        assert!(
            symbols
                .sorted
                .iter()
                .any(|(_, name)| name.contains("elf_symbols_are_read"))
        );
    }

    #[test]
    fn other_files_are_refused_with_the_next_step() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let path = folder.path().join("file");
        std::fs::write(&path, b"\x7fELF but no more").expect("writable");
        let error = Symbols::read(&path).expect_err("no symbols");
        assert!(error.to_string().contains("System.map"), "{error}");
        std::fs::write(&path, [0xff; 100]).expect("writable");
        assert!(matches!(
            Symbols::read(&path),
            Err(SymbolsError::NoSymbols { .. })
        ));
        assert!(matches!(
            Symbols::read(&folder.path().join("none")),
            Err(SymbolsError::Unreadable { .. })
        ));
    }
}
