// SPDX-License-Identifier: Apache-2.0
//! Prints the report as text.

use comfy_table::Table;
use comfy_table::presets::NOTHING;

use patchbay_kernel_image::{FoundBy, KeyReport, Report, SiteReport, SymbolSource};

use crate::print::Printable;

/// A report to print, and a flag that selects whether its table lists keys or sites.
#[derive(Debug, serde::Serialize)]
#[serde(transparent)]
pub struct Listing {
    pub report: Report,
    #[serde(skip)]
    pub sites: bool,
}

impl Printable for Listing {
    fn table(&self) -> String {
        let listing = if self.sites {
            site_table(&self.report)
        } else {
            key_table(&self.report)
        };
        format!("{listing}\n\n{}", summary(&self.report))
    }

    fn names(&self) -> Vec<&str> {
        self.report
            .keys
            .iter()
            .map(|key| key.name.as_str())
            .collect()
    }
}

fn new_table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_preset(NOTHING).set_header(header);
    table
}

fn key_table(report: &Report) -> Table {
    let mut table = new_table(&[
        "KEY",
        "CLASS",
        "INITIAL",
        "SITES",
        "2-BYTE",
        "5-BYTE",
        "INIT",
        "AFTER BOOT",
    ]);
    for key in &report.keys {
        table.add_row([
            key.name.clone(),
            key.class.name().to_owned(),
            key.initial
                .map_or_else(|| "elsewhere".to_owned(), |initial| initial.to_string()),
            key.sites.len().to_string(),
            count(key, |site| site.size == Some(2)).to_string(),
            count(key, |site| site.size == Some(5)).to_string(),
            count(key, |site| site.init).to_string(),
            if key.ro_after_init {
                "read-only"
            } else {
                "flippable"
            }
            .to_owned(),
        ]);
    }
    table
}

fn count(key: &KeyReport, what: impl Fn(&SiteReport) -> bool) -> usize {
    key.sites.iter().filter(|site| what(site)).count()
}

fn site_table(report: &Report) -> Table {
    let mut table = new_table(&[
        "KEY", "ADDRESS", "LOCATION", "SIZE", "BRANCH", "BIT 1", "CODE", "IMAGE", "TARGET",
    ]);
    for key in &report.keys {
        for site in &key.sites {
            table.add_row([
                key.name.clone(),
                format!("{:#x}", site.address),
                site.location.clone().unwrap_or_else(|| "?".to_owned()),
                site.size
                    .map_or_else(|| "?".to_owned(), |size| size.to_string()),
                if site.likely { "likely" } else { "unlikely" }.to_owned(),
                match (report.table.objtool_bit, site.objtool_nop) {
                    (false, _) => "unused",
                    (true, true) => "objtool nop",
                    (true, false) => "keep jmp",
                }
                .to_owned(),
                if site.init { "init" } else { "text" }.to_owned(),
                site.problem
                    .clone()
                    .or_else(|| site.disassembly.clone())
                    .unwrap_or_default(),
                site.target_location
                    .clone()
                    .unwrap_or_else(|| format!("{:#x}", site.target)),
            ]);
        }
    }
    table
}

fn summary(report: &Report) -> String {
    let (image, table, summary) = (&report.image, &report.table, &report.summary);
    let names = match image.symbols {
        SymbolSource::File => "the symbol file",
        SymbolSource::Elf => "the ELF symbols",
        SymbolSource::Kallsyms => "kallsyms",
        SymbolSource::None => "nowhere (give a System.map or vmlinux with --debug-file)",
    };
    format!(
        "{kind}{release}, {bits} bits, compression {compression:?}; {symbols} names from {names}\n\
         jump table {start:#x}..{stop:#x}, {entries} entries, {format}, found by {found_by}\n\
         {keys} keys ({ro} read-only after boot), {sites} sites: {two} of 2 bytes, {five} of 5; {nop} NOP, {jmp} JMP, {boot_nop} boot-time NOP; \
         {likely} likely; {init} in init code\n\
         {explained} of {sites} entries agree with the bytes at their sites; {differ} sites differ from their key's initial value\n",
        kind = image.kind,
        release = image
            .release
            .as_ref()
            .map(|release| format!(" of Linux {release}"))
            .unwrap_or_default(),
        bits = image.bits,
        compression = image.compression,
        symbols = image.symbol_count,
        start = table.start,
        stop = table.stop,
        entries = table.entries,
        format = table.format,
        found_by = match (table.found_by, table.proof) {
            (FoundBy::Symbols, _) => "its symbols".to_owned(),
            (FoundBy::Section, _) => "its section".to_owned(),
            (FoundBy::Search, None) => "a search".to_owned(),
            (FoundBy::Search, Some(code)) => format!(
                "a search (complete: the code at {code:#x} refers to both ends of the table)"
            ),
        },
        keys = summary.keys,
        ro = summary.ro_after_init_keys,
        sites = summary.sites,
        two = summary.two_byte,
        five = summary.five_byte,
        nop = summary.nop,
        jmp = summary.jmp,
        boot_nop = summary.boot_nop,
        likely = summary.likely,
        init = summary.init,
        explained = summary.sites - summary.unexplained,
        differ = summary.differ_from_initial,
    )
}
