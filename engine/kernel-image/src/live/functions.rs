// SPDX-License-Identifier: Apache-2.0
//! The names of the functions of a running kernel, kept as long as its tables are used.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use super::kernel::Kernel;
use crate::classes::location;
use crate::symbols::{SymbolKind, Symbols};

/// The functions of the kernel image and of its modules.
#[derive(Default)]
pub struct Functions {
    images: Vec<Image>,
}

struct Image {
    text: Range<u64>,
    init_text: Range<u64>,
    symbols: Arc<Symbols>,
}

impl Functions {
    /// Returns the function that contains a guest-virtual address, followed by the offset in the
    /// function if it is not 0.
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
    /// Moves the symbols out of the images.
    #[must_use]
    pub fn take_functions(&mut self) -> Functions {
        let images = self.images.iter_mut().map(|image| Image {
            text: image.text.clone(),
            init_text: image.init_text.clone(),
            symbols: std::mem::take(&mut image.symbols),
        });
        Functions {
            images: images.collect(),
        }
    }
}
