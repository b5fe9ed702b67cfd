// SPDX-License-Identifier: Apache-2.0
//! The names of the functions of a running kernel that its branch sites lie in and lead to, kept as
//! long as its tables are used.

use std::fmt;
use std::ops::Range;

use super::kernel::Kernel;
use crate::classes::location;
use crate::symbols::{SymbolKind, Symbols};

/// The functions of the kernel image and of its modules that have a branch site or the target of
/// one.
#[derive(Default)]
pub struct Functions {
    images: Vec<Image>,
}

struct Image {
    text: Range<u64>,
    init_text: Range<u64>,
    symbols: Symbols,
}

impl Functions {
    /// Returns the function that contains the guest-virtual address of a site or of a target,
    /// followed by the offset in the function if it is not 0. The name of any other address may be
    /// wrong.
    #[must_use]
    pub fn name(&self, address: u64) -> Option<String> {
        let holds =
            |image: &&Image| image.text.contains(&address) || image.init_text.contains(&address);
        let image = self.images.iter().find(holds)?;
        let found = image.symbols.resolve(address, SymbolKind::Text)?;
        Some(location(found))
    }
}

impl fmt::Debug for Functions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let symbols: usize = self.images.iter().map(|image| image.symbols.len()).sum();
        f.debug_struct("Functions")
            .field("images", &self.images.len())
            .field("symbols", &symbols)
            .finish()
    }
}

impl Kernel {
    /// Returns the functions of the sites and of their targets.
    #[must_use]
    pub fn functions(&self) -> Functions {
        let sites = self.images.iter().flat_map(|image| &image.sites);
        let addresses = sites.flat_map(|site| [site.entry.code, site.entry.target]);
        let mut addresses: Vec<u64> = addresses.collect();
        addresses.sort_unstable();
        let within = |range: &Range<u64>| {
            let start = addresses.partition_point(|address| *address < range.start);
            let rest = &addresses[start..];
            &rest[..rest.partition_point(|address| *address < range.end)]
        };
        let images = self.images.iter().map(|image| {
            let own = [within(&image.text), within(&image.init_text)].concat();
            Image {
                text: image.text.clone(),
                init_text: image.init_text.clone(),
                symbols: image.symbols.only(own),
            }
        });
        Functions {
            images: images.collect(),
        }
    }
}
