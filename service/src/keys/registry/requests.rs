// SPDX-License-Identifier: Apache-2.0
//! Requests of the guest: it registers its kernel and its modules.

use std::collections::BTreeSet;
use std::sync::{Arc, PoisonError};

use patchbay_guest::abi;
use patchbay_guest::log_limit::limited;
use patchbay_guest::memory::GuestRam;
use patchbay_guest::requests::GuestRequests;
use patchbay_memory::paging::{Levels, PageTable};
use static_keys::Module;

use super::registered::Registration;
use super::request_memory::RequestMemory;
use super::tables::{Contents, KernelTables, Promises};
use super::{OwnRequest, Registry, Writer};
use crate::keys::debug::DebugSites;
use crate::keys::registration::{self as read, Refused, read_request};

impl GuestRequests for Registry {
    fn attach(&self, ram: GuestRam) {
        Registry::attach(self, ram);
    }

    fn request(&self, op: u32, page: u64) -> i32 {
        let Some(ram) = self.ram.get() else {
            return -libc::ENODEV;
        };
        match self.answer(ram, op, page) {
            Ok(()) => 0,
            Err(refused) => {
                limited!(debug, op, error = %refused, "a request of the guest was refused");
                self.state().error = Some(refused.to_string());
                self.changes.send_replace(());
                -libc::EINVAL
            }
        }
    }
}

impl Registry {
    fn register(
        &self,
        memory: RequestMemory<'_>,
        page: &[u8],
        writer: &mut Writer,
    ) -> Result<(), Refused> {
        self.state().own = Some(OwnRequest { withdrawn: None });
        let tables = read_request::<abi::Descriptor>(page, abi::OP_REGISTER)
            .and_then(|descriptor| tables(memory, &descriptor));
        self.install(memory, tables, false, writer)
    }

    fn unregister(&self, page: &[u8]) -> Result<(), Refused> {
        read_request::<abi::Header>(page, abi::OP_UNREGISTER)?;
        self.take_back();
        Ok(())
    }

    /// Returns the registration that a request about a module refers to.
    fn current(&self, generation: u64) -> Result<Arc<Registration>, Refused> {
        match &self.state().registration {
            None => Err(Refused(
                "a module request came before the kernel had registered".to_owned(),
            )),
            Some(registration) if registration.generation != generation => Err(Refused(
                "a module request has another generation than the kernel's registration".to_owned(),
            )),
            Some(registration) => Ok(Arc::clone(registration)),
        }
    }

    fn add_module(
        &self,
        memory: RequestMemory<'_>,
        page: &[u8],
        writer: &mut Writer,
    ) -> Result<(), Refused> {
        let request: abi::Module = read_request(page, abi::OP_MODULE_ADD)?;
        let current = self.current(request.header.generation)?;
        read::check_number("the module's load", request.load)?;
        let known = self
            .state()
            .boot
            .as_ref()
            .and_then(|boot| boot.epoch_of(request.module, request.load));
        let epoch = known.unwrap_or_else(|| writer.next_epoch());
        let mut registration = (*current).clone();
        let added = add_module(memory, &mut registration, &request, epoch);
        let (name, others) = match added {
            Ok(added) => added,
            Err(refused) => {
                self.remember_refused(&current, &request, &refused);
                return Err(refused);
            }
        };
        registration.refused.remove(request.module);
        self.apply_declarations(&mut registration);
        if let Some(boot) = &mut self.state().boot {
            boot.loaded(request.module, request.load, epoch);
            boot.limit(|module| registration.module_name(module).is_some());
        }
        let error = match request.directory_error {
            0 => None,
            error => Some(format!(
                "module {name} lists no keys: its kernel failed with error {error}"
            )),
        };
        self.publish_modules(registration, error);
        self.announce_added(&name);
        for other in others {
            self.announce_added(&other);
        }
        Ok(())
    }

    /// Records the refusal for errors about the module's keys, until the module is unloaded. A
    /// module that is registered and added again keeps its registration.
    fn remember_refused(&self, current: &Registration, request: &abi::Module, refused: &Refused) {
        if current.module_name(request.module).is_some() {
            return;
        }
        let mut registration = current.clone();
        let (name, why) = (read::field_text(&request.name), refused.to_string());
        registration.refused.insert(request.module, name, &why);
        self.publish_modules(registration, Some(why));
    }

    fn delete_module(&self, page: &[u8]) -> Result<(), Refused> {
        let request: abi::Module = read_request(page, abi::OP_MODULE_DEL)?;
        let generation = request.header.generation;
        if let Some(boot) = &mut self.state().boot
            && boot.generation == generation
        {
            boot.unloaded(request.module);
        }
        if self.state().registration.is_none() {
            return Ok(());
        }
        let current = self.current(generation)?;
        // Unregistering is idempotent, because the guest also does it for loads that were rolled
        // back before the module was added.
        let Some(name) = current.module_name(request.module) else {
            if current.refused.has(request.module) {
                let mut registration = (*current).clone();
                registration.refused.remove(request.module);
                self.publish_modules(registration, None);
            }
            return Ok(());
        };
        let mut registration = (*current).clone();
        registration.catalog.remove_module(request.module);
        registration.modules.remove(name);
        self.apply_declarations(&mut registration);
        self.publish_modules(registration, None);
        self.announce_removed(name);
        Ok(())
    }

    /// Reads one request from the guest's page and serves it.
    fn answer(&self, ram: &GuestRam, op: u32, page: u64) -> Result<(), Refused> {
        // The page is copied once, so later writes by another vCPU have no effect.
        let mut copy = vec![0; abi::REQUEST_PAGE_SIZE];
        ram.read(page, &mut copy)
            .map_err(|error| Refused(format!("the request page cannot be read: {error}")))?;
        self.serve(ram.into(), op, &copy)
    }

    /// Serves the request in a copy of its page.
    pub(super) fn serve(
        &self,
        memory: RequestMemory<'_>,
        op: u32,
        copy: &[u8],
    ) -> Result<(), Refused> {
        // Requests of other vCPUs wait here, and these vCPUs cannot stop meanwhile.
        let mut writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        let served = match op {
            abi::OP_REGISTER => self.register(memory, copy, &mut writer),
            abi::OP_UNREGISTER => self.unregister(copy),
            abi::OP_MODULE_ADD => self.add_module(memory, copy, &mut writer),
            abi::OP_MODULE_DEL => self.delete_module(copy),
            _ => Err(Refused(format!("operation {op} is unknown"))),
        };
        writer.kept.note(memory, op, copy, served.is_ok());
        served
    }
}

/// Checks the numbers of a descriptor.
pub(crate) fn tables<'a>(
    memory: impl Into<RequestMemory<'a>>,
    descriptor: &abi::Descriptor,
) -> Result<KernelTables, Refused> {
    let page_table = page_table(descriptor);
    let levels = page_table.levels;
    read::check_number("the boot", descriptor.boot)?;
    let memory = memory.into().mapped_by(page_table);
    let kernel = read::kernel(descriptor, &memory, levels)?;
    Ok(KernelTables {
        boot: descriptor.boot,
        generation: descriptor.header.generation,
        page_table,
        page_table_isolation: descriptor.flags & abi::FLAG_PTI != 0,
        kaslr_offset: descriptor.kaslr_offset,
        release: read::field_text(&descriptor.release),
        build_id: read::build_id(&descriptor.build_id),
        contents: Contents::Described(kernel),
        debug: DebugSites::default(),
        // A vCPU's request provides the fence, and the monitor reports its vCPUs' RIPs.
        promises: Promises {
            fence: true,
            text_gates: false,
        },
        discovery: None,
    })
}

/// Returns the page table of a kernel that registers.
pub(super) fn page_table(descriptor: &abi::Descriptor) -> PageTable {
    PageTable {
        root: descriptor.page_table,
        levels: Levels::of(descriptor.flags & abi::FLAG_LA57 != 0),
    }
}

/// Reads and checks everything that a module's request refers to. Returns the module's name, and
/// the names of other images whose keys became known.
fn add_module(
    memory: RequestMemory<'_>,
    registration: &mut Registration,
    request: &abi::Module,
    epoch: u64,
) -> Result<(Arc<str>, BTreeSet<Arc<str>>), Refused> {
    let levels = registration.page_table.levels;
    read::check_reserved("the module's reserved field", request.reserved)?;
    read::check_address("the module", request.module, levels)?;
    let module = Module {
        id: request.module,
        name: read::module_name(&request.name)?,
        jump_table: read::check_range("the jump table", request.jump_table, levels)?,
        text: read::check_range("text", request.text, levels)?,
        ro_after_init: read::check_range("ro_after_init", request.ro_after_init, levels)?,
        directory: read::directory(request.directory)?,
    };
    let memory = memory.mapped_by(registration.page_table);
    let others = registration
        .catalog
        .add_module(&memory, &module)
        .map_err(|error| Refused(error.to_string()))?;
    let name: Arc<str> = registration
        .module_name(request.module)
        .unwrap_or_default()
        .into();
    registration.modules.insert(Arc::clone(&name), epoch);
    Ok((name, others))
}
