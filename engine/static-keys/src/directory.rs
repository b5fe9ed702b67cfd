// SPDX-License-Identifier: Apache-2.0
//! The key directory: names and classes of an image's keys, copied and sanitised.
//!
//! Names end up on terminals and in logs. Each byte that is not printable ASCII, and each `:` and
//! `#`, becomes `?`. A key without a name gets its address as its name. Static keys of several
//! files may share a name; duplicates are numbered `name#1`, `name#2`, … in the order of their
//! addresses, which is the same in each boot of a kernel. If a later module lists a key under a
//! name that is already in use, the key's address is appended: `name#0xffff…`.

use std::collections::HashMap;

use crate::error::CatalogError;
use crate::kernel::{Directory, FoundKey};
use crate::key::{Class, Key, KeyId};
use crate::limits::{NAME_MAX, NAMES_SIZE_MAX, RECORD_SIZE, RECORD_SIZE_MAX};
use crate::memory::GuestMemory;

/// The tracepoint has functions that the kernel calls when the tracepoint is switched.
const FLAG_REGFUNC: u16 = 1 << 0;
/// Classes in a record.
const GUARDED: u16 = 0;
const REF: u16 = 1;
const TRACEPOINT: u16 = 2;

/// A key in a directory, before it has a full name.
pub(crate) struct Listed {
    pub id: KeyId,
    /// Address of the `struct module` that defines the key; 0 for the kernel.
    pub home: u64,
    class: Class,
    tracepoint: u64,
    switched_by_function: bool,
    name: String,
}

impl Listed {
    /// Converts the listed key to a [`Key`] whose full name includes the module's name.
    pub fn into_key(self, module: &str) -> Key {
        let full_name = match module {
            "" => self.name,
            module => format!("{module}:{}", self.name),
        };
        Key {
            id: self.id,
            full_name: full_name.into(),
            module_length: module.len(),
            class: self.class,
            tracepoint: self.tracepoint,
            switched_by_function: self.switched_by_function,
        }
    }
}

/// One record of the guest's array.
struct Record {
    address: u64,
    name: u32,
    class: u16,
    flags: u16,
    tracepoint: u64,
    /// Address of the `struct module` that defines the key; 0 for the kernel.
    module: u64,
}

impl Record {
    fn decode(bytes: &[u8; RECORD_SIZE]) -> Self {
        let u16_at = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        let u32_at = |at: usize| u32::from_le_bytes(std::array::from_fn(|index| bytes[at + index]));
        let u64_at = |at: usize| u64::from_le_bytes(std::array::from_fn(|index| bytes[at + index]));
        Self {
            address: u64_at(0),
            name: u32_at(8),
            class: u16_at(12),
            flags: u16_at(14),
            tracepoint: u64_at(16),
            module: u64_at(24),
        }
    }

    fn encode(&self) -> [u8; RECORD_SIZE] {
        let mut bytes = [0; RECORD_SIZE];
        bytes[..8].copy_from_slice(&self.address.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.name.to_le_bytes());
        bytes[12..14].copy_from_slice(&self.class.to_le_bytes());
        bytes[14..16].copy_from_slice(&self.flags.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.tracepoint.to_le_bytes());
        bytes[24..].copy_from_slice(&self.module.to_le_bytes());
        bytes
    }
}

/// A key directory as a guest lists it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ListedKeys {
    /// Number of records.
    pub count: u32,
    /// Size of a record in bytes.
    pub record_size: u32,
    /// The array of records.
    pub records: Vec<u8>,
    /// The NUL-terminated names.
    pub names: Vec<u8>,
}

/// Lists the keys of image `image`. [`read`] returns the same keys for the result.
pub(crate) fn list(keys: &[Key], image: u64) -> ListedKeys {
    let mut listed = ListedKeys {
        record_size: RECORD_SIZE as u32,
        ..ListedKeys::default()
    };
    for key in keys {
        let name = u32::try_from(listed.names.len()).unwrap_or(u32::MAX);
        // The numbers of duplicates are not part of the names that the guest lists.
        let own = key.name().split('#').next().unwrap_or_default();
        listed.names.extend_from_slice(own.as_bytes());
        listed.names.push(0);
        let record = Record {
            address: key.id.0,
            name,
            class: match key.class {
                Class::Ref => REF,
                Class::Tracepoint => TRACEPOINT,
                Class::Guarded | Class::DynamicDebug | Class::Never => GUARDED,
            },
            flags: match key.switched_by_function {
                true => FLAG_REGFUNC,
                false => 0,
            },
            tracepoint: key.tracepoint,
            module: image,
        };
        listed.records.extend(record.encode());
        listed.count += 1;
    }
    listed
}

/// Reads the directory of image `image`. Returns the keys sorted by address.
pub(crate) fn read<M: GuestMemory>(
    memory: &M,
    directory: &Directory,
    image: u64,
    tracepoint_key: u32,
    most: usize,
) -> Result<Vec<Listed>, CatalogError> {
    let count = directory.key_count as usize;
    if count > most {
        return Err(CatalogError::TooManyKeys { count });
    }
    if directory.names_size > NAMES_SIZE_MAX {
        return Err(CatalogError::NamesTooLong {
            bytes: directory.names_size,
        });
    }
    if count == 0 {
        return Ok(Vec::new());
    }
    let stride = directory.key_size as usize;
    if !(RECORD_SIZE..=RECORD_SIZE_MAX).contains(&stride) {
        return Err(CatalogError::RecordSize {
            bytes: directory.key_size,
        });
    }
    let mut records = vec![0; count * stride];
    memory.read_gva(directory.keys, &mut records)?;
    let mut names = vec![0; directory.names_size as usize];
    memory.read_gva(directory.names, &mut names)?;

    let records = records
        .chunks_exact(stride)
        .filter_map(|record| record.first_chunk());
    let mut room = NAMES_SIZE_MAX as usize;
    let mut listed = Vec::with_capacity(count);
    for record in records.map(Record::decode) {
        let class = class(&record, tracepoint_key)?;
        check_address(record.address)?;
        if record.flags & !FLAG_REGFUNC != 0 {
            return Err(CatalogError::UnknownFlags {
                address: record.address,
                flags: record.flags,
            });
        }
        let name = name(&names, record.name, record.address)?;
        room = room
            .checked_sub(name.len())
            .ok_or(CatalogError::NamesTooLong {
                bytes: NAMES_SIZE_MAX + 1,
            })?;
        listed.push(Listed {
            id: KeyId(record.address),
            home: record.module,
            class,
            tracepoint: record.tracepoint,
            switched_by_function: record.flags & FLAG_REGFUNC != 0,
            name,
        });
    }
    finish(listed, image)
}

/// Checks the keys of image `image` that were found in the guest's memory. Returns them sorted by
/// address.
pub(crate) fn found(
    keys: Vec<FoundKey>,
    image: u64,
    tracepoint_key: u32,
    most: usize,
) -> Result<Vec<Listed>, CatalogError> {
    let count = keys.len();
    if count > most {
        return Err(CatalogError::TooManyKeys { count });
    }
    let mut listed = Vec::with_capacity(count);
    for key in keys {
        check_address(key.address)?;
        let of_tracepoint = key.tracepoint.checked_add(u64::from(tracepoint_key));
        if key.class == Class::Tracepoint && of_tracepoint != Some(key.address) {
            return Err(CatalogError::NotTheTracepointsKey {
                address: key.address,
                tracepoint: key.tracepoint,
            });
        }
        let name = key.name.as_bytes();
        let name = match &name[..name.len().min(NAME_MAX)] {
            [] => format!("{:#x}", key.address),
            name => clean(name),
        };
        listed.push(Listed {
            id: KeyId(key.address),
            home: image,
            class: key.class,
            tracepoint: key.tracepoint,
            switched_by_function: key.switched_by_function,
            name,
        });
    }
    finish(listed, image)
}

fn check_address(address: u64) -> Result<(), CatalogError> {
    if !address.is_multiple_of(4) || address.checked_add(16).is_none() {
        return Err(CatalogError::KeyAddress { address });
    }
    Ok(())
}

/// Sorts the keys by address and numbers equal names of the image's own keys.
fn finish(mut listed: Vec<Listed>, image: u64) -> Result<Vec<Listed>, CatalogError> {
    listed.sort_by_key(|key| key.id);
    if let Some(pair) = listed.windows(2).find(|pair| pair[0].id == pair[1].id) {
        return Err(CatalogError::KeyTwice {
            address: pair[0].id.0,
        });
    }
    number_duplicates(listed.iter_mut().filter(|key| key.home == image).collect());
    Ok(listed)
}

fn class(record: &Record, tracepoint_key: u32) -> Result<Class, CatalogError> {
    let Record {
        address,
        class,
        tracepoint,
        ..
    } = *record;
    match class {
        GUARDED => Ok(Class::Guarded),
        REF => Ok(Class::Ref),
        TRACEPOINT if tracepoint.checked_add(u64::from(tracepoint_key)) == Some(address) => {
            Ok(Class::Tracepoint)
        }
        TRACEPOINT => Err(CatalogError::NotTheTracepointsKey {
            address,
            tracepoint,
        }),
        _ => Err(CatalogError::UnknownClass { address, class }),
    }
}

fn name(names: &[u8], offset: u32, address: u64) -> Result<String, CatalogError> {
    let rest = names
        .get(offset as usize..)
        .ok_or(CatalogError::NameOutside { address, offset })?;
    let within = &rest[..rest.len().min(NAME_MAX + 1)];
    let length = within
        .iter()
        .position(|&byte| byte == 0)
        .ok_or(CatalogError::NameUnending { address })?;
    Ok(match &within[..length] {
        [] => format!("{address:#x}"),
        name => clean(name),
    })
}

/// Replaces bytes that are not printable, and the separators of full names, with `?`.
pub(crate) fn clean(name: &[u8]) -> String {
    name.iter()
        .map(|&byte| match byte {
            b':' | b'#' => '?',
            byte if byte.is_ascii_graphic() => char::from(byte),
            _ => '?',
        })
        .collect()
}

fn number_duplicates(mut listed: Vec<&mut Listed>) {
    let mut times: HashMap<String, u32> = HashMap::with_capacity(listed.len());
    for key in &listed {
        *times.entry(key.name.clone()).or_default() += 1;
    }
    times.retain(|_, times| *times > 1);
    times.values_mut().for_each(|times| *times = 0);
    for key in &mut listed {
        if let Some(number) = times.get_mut(key.name.as_str()) {
            *number += 1;
            key.name.push_str(&format!("#{number}"));
        }
    }
}
