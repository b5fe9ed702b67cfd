// SPDX-License-Identifier: Apache-2.0
//! The order of a discovery, and the results that a [`Finder`] keeps for the next one.
//!
//! | found once for a kernel | found each time |
//! |---|---|
//! | page table, symbols in use, BTF, VMCOREINFO | vCPUs, mapping of the image, banner, stack canary |
//! | jump table and classes of the image | modules with their tables, classes and symbols |
//! | the words of the gates | their values |
//! | | the bytes of sites, the counts and the lists of keys |
//!
//! The first row of the right column proves that the same kernel still runs.

use std::fmt;
use std::sync::Arc;

use super::contents::{self, KernelSymbols, Own};
use super::debug_file::DebugFile;
use super::debug_folder::DebugFiles;
use super::error::{DiscoveryError, GIVE_TYPES, busy, refuse};
use super::gates::{self, Gates, Wanted};
use super::kernel::{Evidence, Kernel, Log, Way};
use super::layout::Layout;
use super::layout::{self, Inner};
use super::locate::{self, Anchors, Located};
use super::parts::Clock;
use patchbay_memory::{Cpu, PhysicalMemory};
use patchbay_observe::{log, state, tasks, trace};
use static_keys::GateKind;

/// X86_FEATURE_PTI is bit 11 of word 7.
const PTI: (u32, u32) = (4 * 7, 1 << 11);

/// Finds the keys of a running kernel without debug files.
///
/// # Errors
/// [`DiscoveryError`].
pub fn discover<M: PhysicalMemory + ?Sized>(
    memory: &M,
    cpus: &[Cpu],
    way: Way,
) -> Result<Kernel, DiscoveryError> {
    Finder::default().find(memory, cpus, way)
}

/// Discovers one guest repeatedly, and keeps the results that cannot change while the same kernel
/// runs.
#[derive(Default)]
pub struct Finder {
    known: Option<Known>,
    log: Option<KnownLog>,
    files: Option<DebugFiles>,
}

impl fmt::Debug for Finder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let known = self.known.as_ref();
        f.debug_struct("Finder")
            .field("known", &known.map(|known| &known.anchors.release))
            .field("symbols", &known.map(|known| known.symbols.table.len()))
            .finish()
    }
}

impl Finder {
    /// Creates a finder that uses these files for information that a kernel does not reveal itself.
    #[must_use]
    pub fn new(files: Option<DebugFiles>) -> Self {
        Self {
            known: None,
            log: None,
            files,
        }
    }

    /// Checks that at least one vCPU runs the kernel that was found last, and that no vCPU runs
    /// another kernel. The check takes a few reads per vCPU.
    ///
    /// # Errors
    /// [`DiscoveryError::Busy`], also if no kernel was found before.
    pub fn confirm<M: PhysicalMemory + ?Sized>(
        &self,
        memory: &M,
        cpus: &[Cpu],
    ) -> Result<(), DiscoveryError> {
        match &self.known {
            Some(known) => locate::confirm(memory, cpus, &known.anchors),
            None => busy("no kernel was found before"),
        }
    }

    /// Finds the keys of a running kernel, as [`discover`] does. [`Evidence::again`] says whether
    /// an earlier discovery was used.
    ///
    /// # Errors
    /// [`DiscoveryError`].
    pub fn find<M: PhysicalMemory + ?Sized>(
        &mut self,
        memory: &M,
        cpus: &[Cpu],
        way: Way,
    ) -> Result<Kernel, DiscoveryError> {
        self.find_with(memory, cpus, way, Wanted::Running)
    }

    /// Finds the keys also of a kernel that has panicked. They must not be changed, because a CPU
    /// may have stopped in the middle of a change.
    ///
    /// # Errors
    /// [`DiscoveryError`], except [`DiscoveryError::Panics`].
    pub fn find_panicked<M: PhysicalMemory + ?Sized>(
        &mut self,
        memory: &M,
        cpus: &[Cpu],
        way: Way,
    ) -> Result<Kernel, DiscoveryError> {
        self.find_with(memory, cpus, way, Wanted::Panicked)
    }

    fn find_with<M: PhysicalMemory + ?Sized>(
        &mut self,
        memory: &M,
        cpus: &[Cpu],
        way: Way,
        wanted: Wanted,
    ) -> Result<Kernel, DiscoveryError> {
        // Without registers, the running kernel cannot be distinguished from an old one that is
        // still in memory.
        if way == Way::Image
            && let Some(known) = self.known.as_mut().filter(|known| known.is_told_apart())
        {
            match known.again(memory, cpus, wanted) {
                Ok(Some(kernel)) => {
                    known.symbols.reduce(&known.own, &kernel.keys);
                    return Ok(kernel);
                }
                Ok(None) => {}
                Err(error) => {
                    // After a refusal, the next discovery does not reuse these results.
                    if matches!(error, DiscoveryError::Refused(_)) {
                        self.known = None;
                    }
                    return Err(error);
                }
            }
        }
        let (mut known, located, clock) = know(memory, cpus, way, self.files.as_mut(), wanted)?;
        let found = match known.read(located, way, false, clock, wanted) {
            Ok(Some(kernel)) => Ok(kernel),
            Ok(None) => busy("symbols are missing"),
            Err(error) => Err(error),
        };
        self.log = Some(KnownLog {
            anchors: Arc::clone(&known.anchors),
            log: known.log(),
        });
        // If the guest was busy, the discovery is repeated soon and can reuse most of this work.
        let keep = !matches!(found, Err(DiscoveryError::Refused(_)));
        if let Ok(kernel) = &found {
            known.symbols.reduce(&known.own, &kernel.keys);
        }
        self.known = keep.then_some(known);
        found
    }
}

impl Finder {
    /// Finds the log of a running kernel. Unlike [`Finder::find`], it also finds the log of a
    /// kernel that boots, is about to restart, or has panicked. It uses the results of earlier
    /// calls if the vCPUs still run that kernel.
    ///
    /// # Errors
    /// [`DiscoveryError`]. [`DiscoveryError::Refused`] if the kernel does not reveal its log.
    pub fn find_log<M: PhysicalMemory + ?Sized>(
        &mut self,
        memory: &M,
        cpus: &[Cpu],
        way: Way,
    ) -> Result<Log, DiscoveryError> {
        let known = self.log.as_ref().filter(|known| {
            // If the banner and its address are the same, the build and its symbols are the same
            // too.
            way == Way::Image && locate::is_again(memory, cpus, &known.anchors)
        });
        if known.is_none() {
            let (anchored, _) = anchor(memory, cpus, way, self.files.as_mut())?;
            self.log = Some(KnownLog {
                anchors: Arc::clone(&anchored.located.anchors),
                log: log(&anchored.located.anchors, &anchored.inner),
            });
        }
        match &self.log {
            Some(KnownLog { log: Ok(log), .. }) => Ok(log.clone()),
            Some(KnownLog { log: Err(why), .. }) => refuse(why.clone()),
            None => busy("no kernel was found"),
        }
    }
}

/// The location of a kernel's log, which stays valid while the kernel runs.
struct KnownLog {
    anchors: Arc<Anchors>,
    log: Result<Log, String>,
}

/// The results that stay valid while a kernel runs.
struct Known {
    anchors: Arc<Anchors>,
    symbols: KernelSymbols,
    layout: Layout,
    inner: Inner,
    /// The gates of the kernel, without those of modules.
    gates: Gates,
    own: Own,
    page_table_isolation: Option<bool>,
}

impl Known {
    /// Returns whether this kernel can be distinguished from the kernel of the next boot. If it
    /// cannot, a discovery does not reuse these results.
    fn is_told_apart(&self) -> bool {
        !self.gates.missing.contains(&GateKind::SameKernel)
    }

    /// Reads the kernel again, reusing these results. Returns `None` if another kernel runs, or a
    /// key has no name in the symbols that were kept.
    fn again<M: PhysicalMemory + ?Sized>(
        &self,
        memory: &M,
        cpus: &[Cpu],
        wanted: Wanted,
    ) -> Result<Option<Kernel>, DiscoveryError> {
        let mut clock = Clock::start();
        let again = locate::again(memory, cpus, &self.anchors, &self.symbols);
        let Some(mut located) = again else {
            return Ok(None);
        };
        clock.part("same kernel", located.view.copied());
        match self.gates.closed(&mut located.view) {
            Some((GateKind::SameKernel, _)) => Ok(None),
            _ => self.read(located, Way::Image, true, clock, wanted),
        }
    }

    fn log(&self) -> Result<Log, String> {
        log(&self.anchors, &self.inner)
    }

    fn read<M: PhysicalMemory + ?Sized>(
        &self,
        mut located: Located<'_, M>,
        way: Way,
        again: bool,
        mut clock: Clock,
        wanted: Wanted,
    ) -> Result<Option<Kernel>, DiscoveryError> {
        let mut gates = self.gates.clone();
        gates.check(&mut located.view, wanted)?;
        let mut closed = gates.closed(&mut located.view);
        let found = contents::read(
            &mut located,
            &self.own,
            &mut gates,
            &self.layout,
            &self.inner,
            &mut clock,
        );
        // The result is valid only if the modules are still the same.
        located.view.forget();
        gates.check(&mut located.view, wanted)?;
        closed = closed.or_else(|| gates.closed(&mut located.view));
        let closed = closed.map(|(kind, _)| format!(", while the gate {} is closed", kind.name()));
        let found = match (found, &closed) {
            (Err(DiscoveryError::Refused(why)), Some(closed)) => {
                return busy(format!("{why}{closed}"));
            }
            (found, _) => found?,
        };
        let Some(mut contents) = found else {
            return Ok(None);
        };
        // The task that holds a mutex may be changing the key, or may hang because the key is torn.
        if let Some(closed) = &closed {
            for torn in contents.keys.iter_mut().filter_map(|key| key.torn.as_mut()) {
                torn.push_str(closed);
            }
        }
        clock.part("gates", located.view.copied());

        let anchors = &self.anchors;
        Ok(Some(Kernel {
            boot: boot_number(&gates, anchors),
            release: anchors.release.clone(),
            banner: anchors.banner.clone(),
            build_id: anchors.build_id.clone(),
            page_table: located.view.table,
            phys_base: anchors.phys_base,
            kaslr_offset: anchors.kaslr_offset,
            page_table_isolation: self.page_table_isolation,
            nops: self.own.nops,
            layout: self.layout.clone(),
            images: contents.images,
            keys: contents.keys,
            left_out: contents.left_out,
            gates: gates.gates,
            per_cpu_offsets: gates.per_cpu_offsets,
            log: self.log(),
            evidence: Evidence {
                way,
                note: anchors.note,
                file: anchors.file.clone(),
                cpus: located.cpus,
                again,
                missing_gates: gates.missing,
                parts: clock.parts(),
            },
        }))
    }
}

/// A kernel that was located, with the layout of its structures.
struct Anchored<'m, M: ?Sized> {
    located: Located<'m, M>,
    layout: Layout,
    inner: Inner,
}

/// Locates the kernel and reads its types, without the results of earlier discoveries.
fn anchor<'m, M: PhysicalMemory + ?Sized>(
    memory: &'m M,
    cpus: &[Cpu],
    way: Way,
    files: Option<&mut DebugFiles>,
) -> Result<(Anchored<'m, M>, Clock), DiscoveryError> {
    let mut clock = Clock::start();
    let (located, file) = locate::locate(memory, cpus, way, files, &mut clock)?;
    let anchors = Arc::clone(&located.anchors);
    let has_modules = anchors.named.address("modules").is_some();
    let (btf, whose) = match anchors.named.range("__start_BTF", "__stop_BTF") {
        Some(range) => match located.view.data_at(range) {
            Some(btf) => (btf, "the kernel's BTF"),
            None => return refuse("the kernel's BTF does not lie in its read-only data"),
        },
        None => (types_of(file, &anchors)?, "the debug file"),
    };
    let (layout, inner) = layout::read(btf, whose, has_modules)?;
    clock.part("BTF", located.view.copied());
    let anchored = Anchored {
        located,
        layout,
        inner,
    };
    Ok((anchored, clock))
}

/// Finds everything that stays constant while the kernel runs, without the results of earlier
/// discoveries.
fn know<'m, M: PhysicalMemory + ?Sized>(
    memory: &'m M,
    cpus: &[Cpu],
    way: Way,
    files: Option<&mut DebugFiles>,
    wanted: Wanted,
) -> Result<(Known, Located<'m, M>, Clock), DiscoveryError> {
    let (anchored, mut clock) = anchor(memory, cpus, way, files)?;
    let Anchored {
        mut located,
        layout,
        inner,
    } = anchored;
    let anchors = Arc::clone(&located.anchors);
    let view = &mut located.view;
    let symbols = &located.symbols.table;
    let gates = gates::find(view, symbols, &anchors.named, &layout, &inner)?;
    gates.check(view, wanted)?;
    let own = Own::read(&mut located, &layout, &inner, &mut clock)?;
    let page_table_isolation = isolation(&mut located, &inner);
    let known = Known {
        anchors,
        symbols: located.symbols.clone(),
        layout,
        inner,
        gates,
        own,
        page_table_isolation,
    };
    Ok((known, located, clock))
}

/// Returns the location of the kernel's log.
fn log(anchors: &Anchors, inner: &Inner) -> Result<Log, String> {
    let symbol = log::SYMBOL;
    let log = inner.log.clone().and_then(|layout| {
        let unknown = || format!("the kernel has no single symbol {symbol}");
        Ok(Log {
            page_table: anchors.table,
            source: log::Source {
                prb: anchors.named.address(symbol).ok_or_else(unknown)?,
                layout,
            },
            state: state_of(anchors, inner),
            tasks: running(anchors, inner),
            trace: trace(anchors, inner),
        })
    });
    log.map_err(|why| {
        format!("the kernel's log cannot be read: {why}; kernels before 5.10 have another log")
    })
}

/// Returns the locations of the words of the kernel's state.
fn state_of(anchors: &Anchors, inner: &Inner) -> state::Source {
    let address = |symbol| anchors.named.address(symbol);
    let pressure = || {
        let averages = address(state::PRESSURE)?.checked_add(inner.pressure?)?;
        Some([address(state::NO_PRESSURE)?, averages])
    };
    let uptime = || {
        let timekeeper = state::TIMEKEEPERS.into_iter().find_map(address)?;
        inner.timekeeper?.words(timekeeper)
    };
    let reports = address(state::WARNINGS).zip(address(state::OOPSES));
    state::Source {
        taints: address(state::TAINTS),
        load: address(state::LOAD),
        reports: reports.map(<[u64; 2]>::from),
        pressure: pressure(),
        panic: address(state::PANIC),
        uptime: uptime(),
    }
}

/// Returns the locations from which the CPUs' tasks are found.
fn running(anchors: &Anchors, inner: &Inner) -> Result<tasks::Source, String> {
    let address = |symbol| {
        let found = anchors.named.address(symbol);
        found.ok_or_else(|| format!("the kernel has no single symbol {symbol}"))
    };
    let layout = inner.tasks.clone()?;
    let variables = tasks::CURRENT.map(|name| anchors.named.address(name));
    let current = layout.current(variables);
    Ok(tasks::Source {
        cpus: address(tasks::CPUS)?,
        online: address(tasks::ONLINE)?,
        offsets: address(tasks::OFFSETS)?,
        current: current.ok_or("the kernel has no variable with a CPU's task")?,
        layout,
    })
}

/// Returns the location of the kernel's trace events.
fn trace(anchors: &Anchors, inner: &Inner) -> Result<trace::Source, String> {
    let address = |symbol| {
        let found = anchors.named.address(symbol);
        found.ok_or_else(|| {
            format!("the kernel has no single symbol {symbol}: it is built without CONFIG_TRACING or CONFIG_KALLSYMS_ALL")
        })
    };
    Ok(trace::Source {
        layout: inner.trace.clone()?,
        events: address(trace::EVENTS)?,
        common_fields: address(trace::COMMON_FIELDS)?,
        arrays: address(trace::ARRAYS)?,
        cpus: address(trace::CPUS)?,
        syscall_fields: anchors.named.address(trace::SYSCALL_FIELDS),
    })
}

/// Returns the types of the debug file. The build id must be equal: two builds of one source may
/// differ only in their types (RANDSTRUCT), so equal symbols do not prove equal types.
fn types_of<'file>(
    file: Option<&'file DebugFile>,
    anchors: &Anchors,
) -> Result<&'file [u8], DiscoveryError> {
    let Some((file, used)) = file.zip(anchors.file.as_ref()) else {
        return refuse(format!(
            "the kernel has no BTF: it is built without CONFIG_DEBUG_INFO_BTF; {GIVE_TYPES}"
        ));
    };
    let Some(types) = file.types() else {
        return refuse(format!(
            "the kernel has no BTF, and the debug file {} has no types; {GIVE_TYPES}",
            used.path.display()
        ));
    };
    if !used.build_id {
        return refuse(format!(
            "the kernel has no BTF, and nothing proves the types of the debug file {}: it or the kernel has no build id; {GIVE_TYPES}",
            used.path.display()
        ));
    }
    Ok(types)
}

/// Returns the FNV-1a hash of values that differ from boot to boot. The hash does not reveal the
/// canary, which is the guest's secret.
fn boot_number(gates: &Gates, anchors: &Anchors) -> u64 {
    let mut gates = gates.gates.iter();
    let canary = gates.find(|gate| gate.kind == GateKind::SameKernel);
    let canary = canary.map_or(0, |gate| gate.wanted);
    let bytes = canary
        .to_le_bytes()
        .into_iter()
        .chain(anchors.phys_base.to_le_bytes())
        .chain(anchors.banner.bytes());
    let hash = bytes.fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    hash.max(1)
}

fn isolation<M: PhysicalMemory + ?Sized>(
    located: &mut Located<'_, M>,
    inner: &Inner,
) -> Option<bool> {
    let capability = inner.cpu_capability?.checked_add(PTI.0)?;
    let address = located.anchors.named.address("boot_cpu_data")?;
    let word = located
        .view
        .u32(address.checked_add(u64::from(capability))?)?;
    Some(word & PTI.1 != 0)
}
