// SPDX-License-Identifier: Apache-2.0
//! Reads the offsets of the members that a walk needs from the type information of the host's
//! kernel.
//!
//! No offset is built in: the size of `struct kvm` alone differs by tens of KiB between builds.

use std::fs;
use std::io::{self, Read};
use std::path::Path;

use patchbay_kernel_image::{Btf, BtfError};

use crate::memory::TransportError;

/// The folder in which the kernel shows its type information and that of its modules.
const FOLDER: &str = "/sys/kernel/btf";
/// The maximum size of a file of type information. The kernels of distributions have about 7 MiB.
const MAX_FILE: u64 = 64 << 20;

/// The structures that are looked up.
const WANTED: &[&str] = &[
    "dentry",
    "fdtable",
    "file",
    "files_struct",
    "kvm",
    "kvm_memory_slot",
    "kvm_memslots",
    "kvm_svm",
    "kvm_vcpu",
    "pid",
    "pid_namespace",
    "pid_type",
    "rb_node",
    "super_block",
    "task_struct",
    "upid",
    "xa_node",
];

/// The type information cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    /// A file of type information cannot be read.
    #[error("{0}: {1}; the host's kernel needs CONFIG_DEBUG_INFO_BTF")]
    Read(String, String),
    /// A file of type information cannot be used.
    #[error("the type information {0} cannot be used: {1}")]
    Btf(&'static str, BtfError),
    /// A member is missing.
    #[error(
        "the type information of the host's kernel has no {0}; KVM is not loaded, or its module has \
         no type information"
    )]
    Missing(String),
}

impl From<LayoutError> for TransportError {
    fn from(error: LayoutError) -> Self {
        Self {
            what: "the layout of the host's kernel is unknown",
            error: error.to_string(),
            next: "load kvm, or use a kernel with CONFIG_DEBUG_INFO_BTF and \
                   CONFIG_DEBUG_INFO_BTF_MODULES",
        }
    }
}

/// A member that some kernels lack: its offset and its size in bytes.
pub(crate) type Place = (u32, u32);

/// The container of the slots in `struct kvm_memslots`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SlotsLayout {
    /// A red-black tree, since Linux 5.17.
    Tree {
        /// `kvm_memslots.gfn_tree.rb_node`
        root: u32,
        /// `kvm_memslots.node_idx`
        node_index: u32,
        /// `kvm_memory_slot.gfn_node`, an array of two nodes.
        nodes: u32,
        node_size: u32,
        /// `rb_node.rb_left`
        left: u32,
        /// `rb_node.rb_right`
        right: u32,
    },
    /// An array.
    Array {
        /// `kvm_memslots.used_slots`
        used: u32,
        /// `kvm_memslots.memslots`
        first: u32,
    },
}

/// The container of the vCPUs in `struct kvm`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum VcpusLayout {
    /// An xarray, since Linux 5.17: `kvm.vcpu_array.xa_head`.
    Xarray(u32),
    /// An array of pointers: its offset and the number of its elements.
    Array(u32, u32),
}

/// The way to find out whether AMD's SEV protects a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sev {
    /// The host has no SEV.
    Impossible,
    /// `kvm_svm.sev_info.active`, a byte.
    At(u32),
    /// The host has SEV, but the type information does not describe it.
    Unknown,
}

/// The offsets of members.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    pub task_thread_pid: u32,
    pub task_pid_links: u32,
    pub task_files: u32,
    pub task_mm: u32,
    pub pid_level: u32,
    pub pid_tasks: u32,
    pub pid_numbers: u32,
    pub upid_nr: u32,
    pub upid_ns: u32,
    pub upid_size: u32,
    /// `PIDTYPE_TGID`
    pub process_type: u32,
    /// `pid_namespace.idr.idr_rt.xa_head`
    pub ns_head: u32,
    pub ns_base: u32,
    pub node_shift: u32,
    pub node_slots: u32,
    /// Number of `xa_node.slots`.
    pub node_fanout: u32,
    pub files_fdt: u32,
    pub fdt_max: u32,
    pub fdt_fd: u32,
    pub file_private: u32,
    /// `file.f_path.dentry`
    pub file_dentry: u32,
    pub dentry_super: u32,
    /// `dentry.d_name.name`
    pub dentry_name: u32,
    pub super_magic: u32,
    pub kvm_mm: u32,
    pub kvm_memslots: u32,
    /// Number of address spaces.
    pub kvm_spaces: u32,
    pub kvm_online_vcpus: u32,
    pub kvm_vcpus: VcpusLayout,
    pub kvm_dirty_ring: Option<u32>,
    pub kvm_vm_type: Option<Place>,
    pub kvm_protected: Option<u32>,
    pub vcpu_pid: u32,
    pub vcpu_protected: Option<u32>,
    pub sev: Sev,
    pub slots_generation: u32,
    pub slots: SlotsLayout,
    pub slot_size: u32,
    pub slot_base: u32,
    pub slot_pages: u32,
    pub slot_bitmap: u32,
    pub slot_address: u32,
    pub slot_flags: u32,
}

fn read(path: &Path) -> Result<Vec<u8>, LayoutError> {
    let error =
        |error: std::io::Error| LayoutError::Read(path.display().to_string(), error.to_string());
    let mut bytes = Vec::new();
    let file = fs::File::open(path).map_err(error)?;
    file.take(MAX_FILE).read_to_end(&mut bytes).map_err(error)?;
    Ok(bytes)
}

/// Reads the types of a module; `None` if there are none.
fn split<'data>(
    base: &'data Btf<'data>,
    module: &'static str,
    bytes: &'data [u8],
) -> Result<Option<Btf<'data>>, LayoutError> {
    if bytes.is_empty() {
        return Ok(None);
    }
    let types = Btf::parse_split(base, bytes, WANTED);
    types
        .map(Some)
        .map_err(|error| LayoutError::Btf(module, error))
}

/// Returns whether kvm_amd uses SEV, according to the folder of its parameters. SEV is unused only
/// if a module has no such parameter or has it off.
fn sev_is_enabled(parameters: &Path) -> bool {
    match fs::read_to_string(parameters.join("sev")) {
        Ok(value) => !matches!(value.trim(), "0" | "N"),
        Err(error) => error.kind() != io::ErrorKind::NotFound || !parameters.is_dir(),
    }
}

impl Layout {
    /// Reads the layout of the kernel that runs this process.
    pub(crate) fn of_host() -> Result<Self, LayoutError> {
        Self::in_folder(Path::new(FOLDER))
    }

    /// Reads the layout from a folder in the form of [`FOLDER`].
    fn in_folder(folder: &Path) -> Result<Self, LayoutError> {
        let vmlinux = read(&folder.join("vmlinux"))?;
        let base = Btf::parse(&vmlinux, WANTED)
            .map_err(|error| LayoutError::Btf("/sys/kernel/btf/vmlinux", error))?;
        // If KVM is built in, or if its module has no types, the kernel's own types describe KVM.
        let module = |name: &str| read(&folder.join(name)).unwrap_or_default();
        let (kvm, amd) = (module("kvm"), module("kvm_amd"));
        let kvm = split(&base, "/sys/kernel/btf/kvm", &kvm)?;
        let amd = split(&base, "/sys/kernel/btf/kvm_amd", &amd)?;
        let is_amd = fs::read_to_string("/proc/cpuinfo")
            .is_ok_and(|text| text.split_ascii_whitespace().any(|flag| flag == "svm"));
        let enabled = sev_is_enabled(Path::new("/sys/module/kvm_amd/parameters"));
        let sev = Self::sev(amd.as_ref().unwrap_or(&base), is_amd, enabled);
        Self::of(kvm.as_ref().unwrap_or(&base), sev)
    }

    /// Chooses the way to find out whether SEV protects a guest. On a host with an AMD processor
    /// every VM is a `kvm_svm`, whose first member is its `kvm`.
    fn sev(types: &Btf<'_>, is_amd: bool, enabled: bool) -> Sev {
        let first = types.offset("kvm_svm", &["kvm"]) == Some(0);
        let active = types.offset("kvm_svm", &["sev_info", "active"]);
        match (is_amd, active.filter(|_| first)) {
            (true, Some(offset)) => Sev::At(offset),
            (true, None) if enabled => Sev::Unknown,
            _ => Sev::Impossible,
        }
    }

    /// Reads the layout from type information.
    pub(crate) fn of(types: &Btf<'_>, sev: Sev) -> Result<Self, LayoutError> {
        let missing = |structure: &str, path: &[&str]| {
            LayoutError::Missing(format!("{structure}.{}", path.join(".")))
        };
        let at = |structure: &str, path: &[&str]| {
            types
                .offset(structure, path)
                .ok_or_else(|| missing(structure, path))
        };
        let place = |structure: &str, path: &[&str]| {
            let member = types.member(structure, path)?;
            Some((member.offset, types.size_of_member(member)?))
        };
        let array = |structure: &str, path: &[&str]| {
            let (offset, size) = place(structure, path).ok_or_else(|| missing(structure, path))?;
            Ok((offset, size / 8))
        };
        let size = |structure: &str| {
            let size = types.size(structure);
            size.ok_or_else(|| missing(structure, &["size"]))
        };
        let slots = match types.offset("kvm_memslots", &["gfn_tree", "rb_node"]) {
            Some(root) => SlotsLayout::Tree {
                root,
                node_index: at("kvm_memslots", &["node_idx"])?,
                nodes: at("kvm_memory_slot", &["gfn_node"])?,
                node_size: size("rb_node")?,
                left: at("rb_node", &["rb_left"])?,
                right: at("rb_node", &["rb_right"])?,
            },
            None => SlotsLayout::Array {
                used: at("kvm_memslots", &["used_slots"])?,
                first: at("kvm_memslots", &["memslots"])?,
            },
        };
        let kvm_vcpus = match types.offset("kvm", &["vcpu_array", "xa_head"]) {
            Some(head) => VcpusLayout::Xarray(head),
            None => {
                let (offset, count) = array("kvm", &["vcpus"])?;
                VcpusLayout::Array(offset, count)
            }
        };
        let (node_slots, node_fanout) = array("xa_node", &["slots"])?;
        let (kvm_memslots, kvm_spaces) = array("kvm", &["memslots"])?;
        let protected = ["arch", "has_protected_state"];
        Ok(Self {
            task_thread_pid: at("task_struct", &["thread_pid"])?,
            task_pid_links: at("task_struct", &["pid_links"])?,
            task_files: at("task_struct", &["files"])?,
            task_mm: at("task_struct", &["mm"])?,
            pid_level: at("pid", &["level"])?,
            pid_tasks: at("pid", &["tasks"])?,
            pid_numbers: at("pid", &["numbers"])?,
            upid_nr: at("upid", &["nr"])?,
            upid_ns: at("upid", &["ns"])?,
            upid_size: size("upid")?,
            process_type: types
                .enumerator("pid_type", "PIDTYPE_TGID")
                .ok_or_else(|| missing("pid_type", &["PIDTYPE_TGID"]))?,
            ns_head: at("pid_namespace", &["idr", "idr_rt", "xa_head"])?,
            ns_base: at("pid_namespace", &["idr", "idr_base"])?,
            node_shift: at("xa_node", &["shift"])?,
            node_slots,
            node_fanout,
            files_fdt: at("files_struct", &["fdt"])?,
            fdt_max: at("fdtable", &["max_fds"])?,
            fdt_fd: at("fdtable", &["fd"])?,
            file_private: at("file", &["private_data"])?,
            file_dentry: at("file", &["f_path", "dentry"])?,
            dentry_super: at("dentry", &["d_sb"])?,
            dentry_name: at("dentry", &["d_name", "name"])?,
            super_magic: at("super_block", &["s_magic"])?,
            kvm_mm: at("kvm", &["mm"])?,
            kvm_memslots,
            kvm_spaces,
            kvm_online_vcpus: at("kvm", &["online_vcpus", "counter"])?,
            kvm_vcpus,
            kvm_dirty_ring: types.offset("kvm", &["dirty_ring_size"]),
            kvm_vm_type: place("kvm", &["arch", "vm_type"]),
            kvm_protected: types.offset("kvm", &protected),
            vcpu_pid: at("kvm_vcpu", &["pid"])?,
            vcpu_protected: types.offset("kvm_vcpu", &["arch", "guest_state_protected"]),
            sev,
            slots_generation: at("kvm_memslots", &["generation"])?,
            slots,
            slot_size: size("kvm_memory_slot")?,
            slot_base: at("kvm_memory_slot", &["base_gfn"])?,
            slot_pages: at("kvm_memory_slot", &["npages"])?,
            slot_bitmap: at("kvm_memory_slot", &["dirty_bitmap"])?,
            slot_address: at("kvm_memory_slot", &["userspace_addr"])?,
            slot_flags: at("kvm_memory_slot", &["flags"])?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sev_is_off_only_if_its_parameter_says_so() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let parameters = folder.path().join("parameters");
        assert!(sev_is_enabled(&parameters), "the folder cannot be seen");
        fs::create_dir(&parameters).expect("room");
        assert!(!sev_is_enabled(&parameters), "a kernel without SEV");
        for (value, is_enabled) in [("Y\n", true), ("1\n", true), ("N\n", false), ("0\n", false)] {
            fs::write(parameters.join("sev"), value).expect("room");
            assert_eq!(sev_is_enabled(&parameters), is_enabled, "{value}");
        }
    }

    /// Returns the message for a host whose folder of type information has this file `vmlinux`.
    fn refused(vmlinux: Option<&[u8]>) -> String {
        let folder = tempfile::tempdir().expect("temporary folder");
        if let Some(bytes) = vmlinux {
            fs::write(folder.path().join("vmlinux"), bytes).expect("room");
        }
        let error = Layout::in_folder(folder.path()).expect_err("no types");
        TransportError::from(error).to_string()
    }

    #[test]
    fn a_host_without_type_information_is_refused() {
        let error = refused(None);
        for part in [
            "the layout of the host's kernel is unknown",
            "vmlinux: No such file",
            "the host's kernel needs CONFIG_DEBUG_INFO_BTF",
        ] {
            assert!(error.contains(part), "{error}");
        }
    }

    #[test]
    fn type_information_that_is_cut_off_is_refused() {
        // struct btf_header: the types and the strings lie behind the end of the file.
        let mut header = vec![0x9f, 0xeb, 1, 0];
        for word in [24_u32, 0, 4096, 4096, 4096] {
            header.extend(word.to_le_bytes());
        }
        for length in [0, 1, 23, header.len()] {
            let error = refused(Some(&header[..length]));
            let expected = "the type information /sys/kernel/btf/vmlinux cannot be used";
            assert!(error.contains(expected), "{length}: {error}");
        }
    }

    /// Reads this host's own types, where it has KVM and shows them.
    #[test]
    fn this_hosts_layout_is_complete() {
        match Layout::of_host() {
            Err(error @ (LayoutError::Read(..) | LayoutError::Missing(_))) => {
                eprintln!("SKIPPED: {error}");
            }
            layout => {
                let layout = layout.expect("types");
                assert_eq!(layout.upid_size, 16);
                assert!(layout.node_fanout.is_power_of_two(), "{layout:?}");
                assert!((1..=2).contains(&layout.kvm_spaces), "{layout:?}");
            }
        }
    }
}
