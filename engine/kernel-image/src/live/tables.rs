// SPDX-License-Identifier: Apache-2.0
//! Reads the jump tables of a running kernel. Unless every entry is explained, no table is used.
//!
//! An entry is explained if its site and its key are valid. The site must lie in the text of its
//! image and hold its NOP, its JMP or a mixture of the two, or lie in init text that was freed. The
//! key's `type` word must name exactly the entries that the tables have for the key.
//!
//! The guest runs and may change keys while the pages of a key and of its sites are copied one
//! after another. If the copies contradict each other, they are made again, until they agree or the
//! attempts are used up ([`Looks`]). Modules that are not live are left out, as are their nodes in
//! the `static_key_mod` lists of keys.
//!
//! A key is *torn* if a site holds a mixture or does not match the key's count: a process was
//! killed while it changed the key, or the guest is changing the key now. A torn key is reported,
//! and all other keys of the tables can be used.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Range;
use std::thread;
use std::time::Duration;

use static_keys::{Branch, EntryFormat, Image, JumpEntry, KEYS_MAX, Nops, Size, mixture};

use super::error::{DiscoveryError, busy, refuse};
use super::layout::Layout;
use patchbay_memory::PhysicalMemory;

use super::memory::View;
use crate::symbols::Named;

/// `NOP_ATOMIC5` of arch/x86/include/asm/nops.h before 5.13: the index in the array that
/// `ideal_nops` points to.
const NOP_ATOMIC5: u32 = 9;
/// The byte that `text_poke_bp_batch()` (arch/x86/kernel/alternative.c) stores in the first byte of
/// a site while it changes the other bytes.
const INT3: u8 = 0xcc;
/// Bits of a key's `type` word.
const TYPE_LINKED: u64 = 2;
const TYPE_MASK: u64 = 3;

/// The properties of the kernel image or a module that its table is checked against.
#[derive(Clone, Debug)]
pub(super) struct Tables {
    /// Address of the `struct module`; 0 for the kernel.
    pub id: u64,
    pub name: String,
    pub text: Range<u64>,
    /// Init text, which is freed once the image runs.
    pub init: Range<u64>,
    pub ro_after_init: Range<u64>,
    pub jump_table: Range<u64>,
    /// Address ranges of the image's data and code.
    pub areas: Vec<Range<u64>>,
}

/// A branch site.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Site {
    /// The entry of the site.
    pub entry: JumpEntry,
    /// The instruction at the site; `None` if the site lies in init text that was freed, or holds a
    /// mixture of its NOP and its JMP.
    pub holds: Option<(Size, Branch)>,
    /// The site holds a mixture of its NOP and its JMP.
    pub is_mixture: bool,
}

/// A key and the location of its sites.
#[derive(Clone, Debug, Default)]
pub(super) struct Used {
    /// Index of the image that defines the key.
    pub home: usize,
    pub count: i32,
    /// The key can no longer change.
    pub sealed: bool,
    /// The reason why the key is torn; `None` if it is not torn.
    pub torn: Option<String>,
    /// The images with entries of the key. Each has its index, the address of its first entry, and
    /// the range of its entries in the table.
    pub runs: Vec<(usize, u64, Range<usize>)>,
}

/// The number of times that a discovery may still read data again because the guest is changing it.
/// A change of a key takes about 100 µs.
pub(super) struct Looks(u32);

impl Default for Looks {
    fn default() -> Self {
        Self(64)
    }
}

/// The maximum number of times that a seemingly torn key is read again.
const LOOKS_PER_KEY: u32 = 16;

impl Looks {
    const INTERVAL: Duration = Duration::from_micros(50);

    /// Waits before another attempt. Returns `false` if the attempts are used up.
    fn again(&mut self) -> bool {
        if self.0 == 0 {
            return false;
        }
        self.0 -= 1;
        thread::sleep(Self::INTERVAL);
        true
    }
}

/// Returns the NOPs that the kernel writes to its sites.
pub(super) fn nops<M: PhysicalMemory + ?Sized>(
    view: &mut View<'_, M>,
    named: &Named,
) -> Result<Nops, DiscoveryError> {
    let Some(pointer) = named.address("ideal_nops") else {
        return Ok(Nops::Fixed);
    };
    let nop = view
        .u64(pointer)
        .and_then(|array| view.pointer(array, 8 * NOP_ATOMIC5));
    let mut bytes = [0; 5];
    if nop.and_then(|nop| view.read(nop, &mut bytes)).is_none() {
        return refuse("the NOP of five bytes that ideal_nops leads to is not mapped");
    }
    match Nops::ideal(bytes) {
        Some(nops) => Ok(nops),
        None => refuse(format!(
            "ideal_nops leads to {}, which is no NOP of five bytes that a 64-bit kernel chooses",
            static_keys::Hex(&bytes)
        )),
    }
}

/// Reads the jump table of an image.
pub(super) fn entries<M: PhysicalMemory + ?Sized>(
    view: &mut View<'_, M>,
    image: &Tables,
    most: usize,
) -> Result<Vec<JumpEntry>, DiscoveryError> {
    let size = EntryFormat::Relative.entry_size() as u64;
    let length = image.jump_table.end.saturating_sub(image.jump_table.start);
    let whose = whose(image);
    if !length.is_multiple_of(size) || length / size > most as u64 {
        return refuse(format!(
            "the jump table {:#x}..{:#x} of {whose} is no whole number of entries of {size} bytes, or more than {most} are left for it",
            image.jump_table.start, image.jump_table.end
        ));
    }
    let Some(bytes) = view.array(image.jump_table.start, length, 1, length) else {
        return busy(format!("the jump table of {whose} is not mapped"));
    };
    let entries: Vec<JumpEntry> = EntryFormat::Relative
        .entries(image.jump_table.start, &bytes, Image::Live)
        .collect();
    if !entries.is_sorted_by_key(|entry| entry.key) {
        return busy(format!("the jump table of {whose} is not sorted: it boots"));
    }
    Ok(entries)
}

/// Reads the sites of a table.
pub(super) fn sites<M: PhysicalMemory + ?Sized>(
    view: &mut View<'_, M>,
    image: &Tables,
    nops: Nops,
    entries: &[JumpEntry],
    looks: &mut Looks,
) -> Result<Vec<Site>, DiscoveryError> {
    let entries = entries.iter();
    entries
        .map(|entry| settled_site(view, image, nops, *entry, looks))
        .collect()
}

/// Reads a site, and reads it again while the guest is changing it.
fn settled_site<M: PhysicalMemory + ?Sized>(
    view: &mut View<'_, M>,
    image: &Tables,
    nops: Nops,
    entry: JumpEntry,
    looks: &mut Looks,
) -> Result<Site, DiscoveryError> {
    let mut first = true;
    loop {
        let found = site(view, image, nops, entry);
        match &found {
            Err(DiscoveryError::Busy(_)) if looks.again() => {}
            // A copy is not atomic: the first byte may be from before a change, and the other bytes
            // from after it.
            Err(DiscoveryError::Refused(_)) if first => first = false,
            _ => return found,
        }
        view.forget_at(entry.code);
    }
}

fn whose(image: &Tables) -> String {
    match image.id {
        0 => "the kernel".to_owned(),
        _ => format!("module {}", image.name),
    }
}

fn site<M: PhysicalMemory + ?Sized>(
    view: &mut View<'_, M>,
    image: &Tables,
    nops: Nops,
    mut entry: JumpEntry,
) -> Result<Site, DiscoveryError> {
    entry.init |= image.init.contains(&entry.code);
    if entry.init {
        return Ok(Site {
            entry,
            holds: None,
            is_mixture: false,
        });
    }
    let whose = whose(image);
    if !image.text.contains(&entry.code) {
        return refuse(format!(
            "the site at {:#x} of {whose} lies outside its text {:#x}..{:#x}",
            entry.code, image.text.start, image.text.end
        ));
    }
    // A site has five bytes, or two if no more are mapped.
    let mut bytes = [0; 5];
    let read = match view.read(entry.code, &mut bytes) {
        Some(()) => Some(5),
        None => view.read(entry.code, &mut bytes[..2]).map(|()| 2),
    };
    let Some(length) = read else {
        return refuse(format!(
            "the site at {:#x} of {whose} is not mapped",
            entry.code
        ));
    };
    match nops.recognise(&bytes[..length], entry.code, entry.target) {
        Some(holds) => Ok(Site {
            entry,
            holds: Some(holds),
            is_mixture: false,
        }),
        None if bytes[0] == INT3 => busy(format!(
            "the site at {:#x} of {whose} holds a breakpoint: the guest changes its text",
            entry.code
        )),
        None if mixture(nops, &bytes[..length], entry.code, entry.target).is_some() => Ok(Site {
            entry,
            holds: None,
            is_mixture: true,
        }),
        None => refuse(format!(
            "the site at {:#x} of {whose} holds {}, neither its NOP nor the JMP to {:#x}",
            entry.code,
            static_keys::Hex(&bytes[..length]),
            entry.target
        )),
    }
}

/// Address ranges of images, sorted.
struct Ranges(Vec<(Range<u64>, usize)>);

impl Ranges {
    fn new<'a>(ranges: impl Iterator<Item = (&'a Range<u64>, usize)>) -> Self {
        let ranges = ranges.filter(|(range, _)| !range.is_empty());
        let mut ranges: Vec<_> = ranges
            .map(|(range, image)| (range.clone(), image))
            .collect();
        ranges.sort_by_key(|(range, _)| range.start);
        Self(ranges)
    }

    /// Returns the image whose range contains the address. The ranges of a kernel do not overlap.
    /// If a hostile guest's ranges do, any of them may be used.
    fn image(&self, address: u64) -> Option<usize> {
        let next = self.0.partition_point(|(range, _)| range.start <= address);
        let (range, image) = self.0.get(next.checked_sub(1)?)?;
        range.contains(&address).then_some(*image)
    }
}

/// The images. They are indexed because each key is looked up, and a kernel may have 131,072 keys
/// and 4,096 modules.
struct Images<'a> {
    tables: &'a [Tables],
    areas: Ranges,
    texts: Ranges,
    by_id: HashMap<u64, usize>,
    /// Addresses of the modules that are not among the images.
    left_out: &'a HashSet<u64>,
}

impl<'a> Images<'a> {
    fn new(tables: &'a [Tables], left_out: &'a HashSet<u64>) -> Self {
        let areas = (0..).zip(tables).flat_map(|(index, image)| {
            let areas = image.areas.iter();
            areas.map(move |area| (area, index))
        });
        let texts = (0..).zip(tables).map(|(index, image)| (&image.text, index));
        let ids = (0..).zip(tables).map(|(index, image)| (image.id, index));
        Self {
            tables,
            areas: Ranges::new(areas),
            texts: Ranges::new(texts),
            by_id: ids.collect(),
            left_out,
        }
    }
}

/// Groups the sites of all images by key, and compares them with the words of the keys. `left_out`
/// contains the addresses of modules that are not among the images.
pub(super) fn keys<M: PhysicalMemory + ?Sized>(
    view: &mut View<'_, M>,
    images: &[Tables],
    sites: &mut [Vec<Site>],
    left_out: &HashSet<u64>,
    nops: Nops,
    layout: &Layout,
    looks: &mut Looks,
) -> Result<BTreeMap<u64, Used>, DiscoveryError> {
    let mut keys: BTreeMap<u64, Used> = BTreeMap::new();
    for (index, (image, sites)) in images.iter().zip(&*sites).enumerate() {
        let mut start = 0;
        for run in sites.chunk_by(|a, b| a.entry.key == b.entry.key) {
            let Some(first) = run.first() else { continue };
            let at = image.jump_table.start + (start * EntryFormat::Relative.entry_size()) as u64;
            let used = keys.entry(first.entry.key).or_default();
            used.runs.push((index, at, start..start + run.len()));
            start += run.len();
        }
    }
    if keys.len() > KEYS_MAX {
        return refuse(format!(
            "{} keys are more than the {KEYS_MAX} that are supported",
            keys.len()
        ));
    }
    let images = Images::new(images, left_out);
    // A key that stays torn must not use up the attempts for keys that the guest is changing.
    let mut torn_looks = Looks::default();
    for (address, used) in &mut keys {
        let mut left = LOOKS_PER_KEY;
        used.torn = loop {
            let found = key(view, &images, *address, used, layout)
                .and_then(|()| torn(*address, used, sites));
            match found {
                Ok(None) => break None,
                Ok(torn) if left == 0 || !torn_looks.again() => break torn,
                Ok(_) => left -= 1,
                Err(DiscoveryError::Busy(_)) if looks.again() => {}
                Err(error) => return Err(error),
            }
            view.forget_at(*address);
            look_again(view, &images, used, sites, nops, looks)?;
        };
    }
    Ok(keys)
}

/// Reads the sites of a key again.
fn look_again<M: PhysicalMemory + ?Sized>(
    view: &mut View<'_, M>,
    images: &Images<'_>,
    used: &Used,
    sites: &mut [Vec<Site>],
    nops: Nops,
    looks: &mut Looks,
) -> Result<(), DiscoveryError> {
    for (image, _, range) in &used.runs {
        let Some(tables) = images.tables.get(*image) else {
            continue;
        };
        let run = sites
            .get_mut(*image)
            .and_then(|sites| sites.get_mut(range.clone()));
        for known in run.into_iter().flatten() {
            view.forget_at(known.entry.code);
            *known = settled_site(view, tables, nops, known.entry, looks)?;
        }
    }
    Ok(())
}

/// Reads the words of a key, and checks that its `type` word names exactly its entries in the
/// tables.
fn key<M: PhysicalMemory + ?Sized>(
    view: &mut View<'_, M>,
    images: &Images<'_>,
    address: u64,
    used: &mut Used,
    layout: &Layout,
) -> Result<(), DiscoveryError> {
    let Some(home) = images.areas.image(address) else {
        return refuse(format!(
            "the key at {address:#x} lies in no image: a module that is not in the list has sites"
        ));
    };
    if images.texts.image(address).is_some() {
        return refuse(format!("the key at {address:#x} lies in text"));
    }
    let words = view
        .u32(address)
        .zip(view.pointer(address, layout.keys.static_key_type));
    let Some((count, kind)) = words else {
        return refuse(format!("the key at {address:#x} is not mapped"));
    };
    used.home = home;
    used.count = count.cast_signed();
    let pointer = kind & !TYPE_MASK;
    used.sealed = images
        .tables
        .get(home)
        .is_some_and(|image| image.ro_after_init.contains(&address))
        || kind & TYPE_LINKED != 0 && pointer == 0;
    if used.sealed {
        return Ok(());
    }
    let mut named = if kind & TYPE_LINKED == 0 {
        vec![(home, pointer)]
    } else {
        chain(view, images, address, pointer, used.runs.len(), layout)?
    };
    named.sort_unstable();
    let found: Vec<(usize, u64)> = used
        .runs
        .iter()
        .map(|(image, first, _)| (*image, *first))
        .collect();
    if named == found {
        return Ok(());
    }
    busy(format!(
        "the key at {address:#x} names other entries than the jump tables have for it"
    ))
}

/// Follows the list of `struct static_key_mod`. `users` is the number of images with entries for
/// the key.
fn chain<M: PhysicalMemory + ?Sized>(
    view: &mut View<'_, M>,
    images: &Images<'_>,
    key: u64,
    mut node: u64,
    users: usize,
    layout: &Layout,
) -> Result<Vec<(usize, u64)>, DiscoveryError> {
    let mut named = Vec::new();
    // The list has at most one node for each user and for each module that was left out. It may
    // also have a node without entries for the image that defines the key.
    for _ in 0..users + images.left_out.len() + 2 {
        if node == 0 {
            return Ok(named);
        }
        let mut member = |offset| view.pointer(node, offset);
        let (Some(next), Some(entries), Some(module)) = (
            member(layout.keys.static_key_mod_next),
            member(layout.keys.static_key_mod_entries),
            member(layout.keys.static_key_mod_mod),
        ) else {
            return busy(format!(
                "the module list of the key at {key:#x} leads to memory that is not mapped"
            ));
        };
        if entries != 0 {
            match images.by_id.get(&module) {
                Some(image) => named.push((*image, entries)),
                None if images.left_out.contains(&module) => {}
                None => {
                    return busy(format!(
                        "the key at {key:#x} is used by a module at {module:#x} that is not in the list of modules"
                    ));
                }
            }
        }
        node = next;
    }
    busy(format!(
        "the module list of the key at {key:#x} is longer than the {users} images that use it"
    ))
}

/// Returns the reason why the sites do not match the count; `None` if they match. A sealed key is
/// not compared, because its words have no meaning.
fn torn(address: u64, used: &Used, sites: &[Vec<Site>]) -> Result<Option<String>, DiscoveryError> {
    if used.sealed {
        return Ok(None);
    }
    if used.count < 0 {
        return busy(format!(
            "the guest is just taking the first reference of the key at {address:#x}"
        ));
    }
    for (image, _, range) in &used.runs {
        let run = sites.get(*image).and_then(|sites| sites.get(range.clone()));
        for site in run.into_iter().flatten() {
            let asked = Branch::of(used.count > 0, site.entry.likely);
            if site.is_mixture {
                return Ok(Some(format!(
                    "the site at {:#x} holds a mixture of its NOP and its JMP",
                    site.entry.code
                )));
            }
            if site.holds.is_some_and(|(_, found)| found != asked) {
                return Ok(Some(format!(
                    "the site at {:#x} does not do what the count {} of its key asks for",
                    site.entry.code, used.count
                )));
            }
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;
    use patchbay_memory::OutsideMemory;
    use patchbay_memory::paging::{Levels, PageTable};

    /// A guest whose memory cannot be read.
    struct Nothing;

    impl PhysicalMemory for Nothing {
        fn ram(&self) -> Vec<Range<u64>> {
            Vec::new()
        }

        fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), OutsideMemory> {
            let length = bytes.len();
            Err(OutsideMemory { address, length })
        }
    }

    /// Returns the refusal of a table with this many keys.
    fn refused(count: usize) -> String {
        let table = PageTable {
            root: 0,
            levels: Levels::Four,
        };
        let image = Tables {
            id: 0,
            name: String::new(),
            text: 0..0,
            init: 0..0,
            ro_after_init: 0..0,
            jump_table: 0..0,
            areas: std::iter::once(0..1 << 32).collect(),
        };
        let site = |key| Site {
            entry: JumpEntry {
                code: 0,
                target: 0,
                key,
                likely: false,
                init: true,
                objtool_nop: false,
            },
            holds: None,
            is_mixture: false,
        };
        let sites: Vec<Site> = (0..count as u64).map(|index| site(16 * index)).collect();
        let mut view = View::new(&Nothing, table);
        let found = keys(
            &mut view,
            &[image],
            &mut [sites],
            &HashSet::new(),
            Nops::Fixed,
            &Layout::default(),
            &mut Looks::default(),
        );
        match found {
            Err(DiscoveryError::Refused(why)) => why,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn keys_are_counted_before_they_are_read() {
        assert!(refused(KEYS_MAX).contains("is not mapped"));
        assert!(refused(KEYS_MAX + 1).contains("131073 keys are more than the 131072"));
    }
}
