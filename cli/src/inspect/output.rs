// SPDX-License-Identifier: Apache-2.0
//! The report as text.

use std::io::{self, Write};

use comfy_table::Table;
use comfy_table::presets::NOTHING;

use super::report::{Class, Report};

/// Forms of output.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    /// For people.
    #[default]
    Table,
    /// For programs.
    Json,
    /// For programs and people.
    Yaml,
    /// Key names only.
    Name,
}

/// Prints to standard output; a reader that goes away early is no error.
pub fn print(report: &Report, format: Format, sites: bool) -> anyhow::Result<()> {
    let text = match format {
        Format::Table => table(report, sites),
        Format::Json => serde_json::to_string_pretty(report)? + "\n",
        Format::Yaml => yaml(&serde_json::to_value(report)?),
        Format::Name => report.keys.iter().map(|key| key.name.clone() + "\n").collect(),
    };
    match io::stdout().lock().write_all(text.as_bytes()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        other => Ok(other?),
    }
}

fn new_table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_preset(NOTHING).set_header(header);
    table
}

fn table(report: &Report, sites: bool) -> String {
    let listing = if sites { site_table(report) } else { key_table(report) };
    format!("{}\n\n{}", listing.to_string(), summary(report))
}

fn key_table(report: &Report) -> Table {
    let mut table = new_table(&["KEY", "CLASS", "INITIAL", "SITES", "2-BYTE", "5-BYTE", "INIT", "AFTER BOOT"]);
    for key in &report.keys {
        let count = |what: &dyn Fn(&super::report::SiteReport) -> bool| key.sites.iter().filter(|site| what(site)).count();
        table.add_row([
            key.name.clone(),
            match key.class {
                Class::Tracepoint => "tracepoint",
                Class::Ref => "ref",
                Class::Guarded => "guarded",
            }
            .to_owned(),
            key.initial.map_or_else(|| "elsewhere".to_owned(), |initial| initial.to_string()),
            key.sites.len().to_string(),
            count(&|site| site.size == Some(2)).to_string(),
            count(&|site| site.size == Some(5)).to_string(),
            count(&|site| site.init).to_string(),
            if key.ro_after_init { "read-only" } else { "flippable" }.to_owned(),
        ]);
    }
    table
}

fn site_table(report: &Report) -> Table {
    let mut table = new_table(&["KEY", "ADDRESS", "LOCATION", "SIZE", "BRANCH", "BIT 1", "CODE", "IMAGE", "TARGET"]);
    for key in &report.keys {
        for site in &key.sites {
            table.add_row([
                key.name.clone(),
                format!("{:#x}", site.address),
                site.location.clone().unwrap_or_else(|| "?".to_owned()),
                site.size.map_or_else(|| "?".to_owned(), |size| size.to_string()),
                if site.likely { "likely" } else { "unlikely" }.to_owned(),
                match (report.table.objtool_bit, site.objtool_nop) {
                    (false, _) => "unused",
                    (true, true) => "objtool nop",
                    (true, false) => "keep jmp",
                }
                .to_owned(),
                if site.init { "init" } else { "text" }.to_owned(),
                site.problem.clone().or_else(|| site.disassembly.clone()).unwrap_or_default(),
                site.target_location.clone().unwrap_or_else(|| format!("{:#x}", site.target)),
            ]);
        }
    }
    table
}

fn summary(report: &Report) -> String {
    let (image, table, summary) = (&report.image, &report.table, &report.summary);
    let names = match image.symbols {
        super::report::SymbolSource::File => "the symbol file",
        super::report::SymbolSource::Elf => "the ELF symbols",
        super::report::SymbolSource::Kallsyms => "kallsyms",
        super::report::SymbolSource::None => "nowhere (give a System.map with --symbols)",
    };
    format!(
        "{kind}{release}, {bits} bits, compression {compression:?}; {symbols} names from {names}\n\
         jump table {start:#x}..{stop:#x}, {entries} entries, {format}, found by {found_by:?}\n\
         {keys} keys ({ro} read-only after boot), {sites} sites: {two} of 2 bytes, {five} of 5; {nop} NOP, {jmp} JMP, {boot_nop} boot-time NOP; \
         {likely} likely; {init} in init code\n\
         {explained} of {sites} entries agree with the bytes at their sites; {differ} sites differ from their key's initial value\n",
        kind = image.kind,
        release = image.release.as_ref().map(|release| format!(" of Linux {release}")).unwrap_or_default(),
        bits = image.bits,
        compression = image.compression,
        symbols = image.symbol_count,
        start = table.start,
        stop = table.stop,
        entries = table.entries,
        format = table.format,
        found_by = table.found_by,
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

/// YAML in block style; strings are quoted as JSON quotes them, which YAML 1.2 reads alike.
fn yaml(value: &serde_json::Value) -> String {
    let mut text = String::new();
    write_yaml(value, 0, &mut text);
    text
}

fn write_yaml(value: &serde_json::Value, depth: usize, text: &mut String) {
    use serde_json::Value;
    let indent = "  ".repeat(depth);
    match value {
        Value::Object(fields) if !fields.is_empty() => {
            for (name, value) in fields {
                write_member(&format!("{indent}{name}:"), value, depth, text);
            }
        }
        Value::Array(items) if !items.is_empty() => {
            for item in items {
                write_member(&format!("{indent}-"), item, depth, text);
            }
        }
        scalar => text.push_str(&format!("{indent}{scalar}\n")),
    }
}

fn write_member(head: &str, value: &serde_json::Value, depth: usize, text: &mut String) {
    let nested = match value {
        serde_json::Value::Object(fields) => !fields.is_empty(),
        serde_json::Value::Array(items) => !items.is_empty(),
        _ => false,
    };
    text.push_str(head);
    if nested {
        text.push('\n');
        write_yaml(value, depth + 1, text);
    } else {
        text.push_str(&format!(" {value}\n"));
    }
}
