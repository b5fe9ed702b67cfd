// SPDX-License-Identifier: Apache-2.0
//! The fuzz targets: whole files, and changes of a valid image, which get past the first checks.

use patchbay_kernel_image::{Format, FoundBy, Report, inspect};

use crate::craft::bzimage;
use crate::craft_kallsyms::{ORDERS, kernel};

/// A target and its name.
pub type Named = (&'static str, fn(&[u8]));

/// The targets by name.
pub const TARGETS: &[Named] = &[("image_files", image_files), ("images", images)];

/// Inspects the input as a file, and as the payload of a bzImage.
pub fn image_files(data: &[u8]) {
    for file in [data, &bzimage(data)] {
        if let Ok(report) = inspect(file, None) {
            check(&report);
        }
    }
}

/// Changes bytes of a valid image and inspects it. The first byte of the input chooses the image.
/// Each further group of four bytes changes a byte of the image.
pub fn images(data: &[u8]) {
    let Some((choice, changes)) = data.split_first() else {
        return;
    };
    let format = if choice & 1 == 0 {
        Format::Relative64
    } else {
        Format::Relative32
    };
    let order = ORDERS[usize::from(choice >> 1) % ORDERS.len()];
    let mut file = kernel(format, order, choice & 8 != 0, choice & 16 != 0).elf();
    for change in changes.chunks_exact(4) {
        let at = u32::from_le_bytes([change[0], change[1], change[2], 0]) as usize % file.len();
        file[at] = change[3];
    }
    if let Ok(report) = inspect(&file, None) {
        check(&report);
    }
}

/// Checks the guarantees of every report.
fn check(report: &Report) {
    let (table, summary) = (&report.table, &report.summary);
    assert_eq!(
        table.start + table.entry_size * table.entries as u64,
        table.stop
    );
    assert_eq!(summary.sites, table.entries);
    assert_eq!(
        summary.sites,
        report.keys.iter().map(|key| key.sites.len()).sum()
    );
    assert_eq!(table.proof.is_some(), table.found_by == FoundBy::Search);
}
