// SPDX-License-Identifier: Apache-2.0
//! Parses registers as QEMU's `info registers -a` prints them.

/// The maximum number of vCPUs.
const MAX_VCPUS: usize = 4096;

/// The registers of a vCPU. If the vCPU runs a nested guest, these are the nested guest's
/// registers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Registers {
    /// RIP, or EIP outside long mode.
    pub rip: u64,
    /// CR0. Bit 31: paging is on.
    pub cr0: u64,
    /// CR3, the address of the page table.
    pub cr3: u64,
    /// CR4. Bit 12: page tables have five levels.
    pub cr4: u64,
    /// EFER. Bit 12: SVM is on.
    pub efer: u64,
    /// IDTR.base.
    pub idt_base: u64,
}

/// Returns the registers of each vCPU, in QEMU's order.
///
/// # Errors
/// A register is missing; the error is a sentence.
pub fn parse(text: &str) -> Result<Vec<Registers>, String> {
    let mut vcpus = Vec::new();
    for (index, part) in text.split("CPU#").skip(1).enumerate() {
        if index == MAX_VCPUS {
            return Err(format!("the guest has more than {MAX_VCPUS} vCPUs"));
        }
        let word = |names: &[&str]| {
            let found = names.iter().find_map(|name| value(part, name));
            found.ok_or_else(|| format!("{} of vCPU {index}", names[0]))
        };
        vcpus.push(Registers {
            rip: word(&["RIP=", "EIP="])?,
            cr0: word(&["CR0="])?,
            cr3: word(&["CR3="])?,
            cr4: word(&["CR4="])?,
            efer: word(&["EFER="])?,
            idt_base: word(&["IDT="])?,
        });
    }
    if vcpus.is_empty() {
        return Err("a vCPU".to_owned());
    }
    Ok(vcpus)
}

/// Returns the hexadecimal number after a name that begins a word.
fn value(text: &str, name: &str) -> Option<u64> {
    let begins = |at: &usize| *at == 0 || text.as_bytes()[at - 1].is_ascii_whitespace();
    let (at, _) = text.match_indices(name).find(|(at, _)| begins(at))?;
    let digits = text[at + name.len()..].split_ascii_whitespace().next()?;
    u64::from_str_radix(digits, 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The output of QEMU 7.2 for two vCPUs in a 64-bit Linux.
    const LINUX: &str = include_str!("../tests/data/registers-6.12.txt");
    /// The output for a vCPU at its reset vector, with lines between the registers.
    const RESET: &str = "\r\nCPU#0\r\nEAX=00000000 EBX=00000000\r\nEIP=0000fff0 EFL=00000002 [-------] CPL=0\r\nGDT=     00000000 0000ffff\r\n\
        IDT=     00000000 0000ffff\r\nCR0=60000010 CR2=00000000 CR3=00000000 CR4=00000000\r\n\
        EFER=0000000000000000\r\n";

    #[test]
    fn registers_of_a_running_linux() {
        let vcpus = parse(LINUX).expect("registers");
        assert_eq!(vcpus.len(), 2);
        for vcpu in vcpus {
            assert!(vcpu.rip > 0xffff_ffff_8000_0000, "{vcpu:x?}");
            assert_eq!(vcpu.idt_base, 0xffff_fe00_0000_0000);
            assert!(
                vcpu.cr0 >> 31 == 1 && vcpu.cr3 != 0 && vcpu.cr4 >> 5 & 1 == 1,
                "{vcpu:x?}"
            );
        }
    }

    #[test]
    fn registers_at_reset() {
        let reset = Registers {
            rip: 0xfff0,
            cr0: 0x6000_0010,
            ..Registers::default()
        };
        assert_eq!(parse(RESET), Ok(vec![reset]));
    }

    #[test]
    fn what_is_missing_is_named() {
        assert!(parse("").unwrap_err().contains("a vCPU"));
        for name in ["EIP=", "CR0=", "CR3=", "CR4=", "EFER=", "IDT="] {
            let without = RESET.replace(name, "XXX=");
            let error = parse(&without).expect_err(name);
            assert!(error.ends_with("of vCPU 0"), "{error}");
            let nonsense = RESET.replace(name, &format!("{name}zz"));
            assert!(parse(&nonsense).is_err(), "{name}");
        }
        // Another register's name ends with this name.
        let other = RESET.replace("CR3=00000000", "XCR3=00000000");
        assert!(parse(&other).unwrap_err().contains("CR3"));
    }
}
