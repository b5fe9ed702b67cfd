// SPDX-License-Identifier: Apache-2.0
//! Lists the virtual machines of the machine that runs the tests. This process is the monitor of
//! one.

use kvm_ioctls::Kvm;
use serde_json::Value;

use super::lab::{Commands, Lab};

#[test]
fn a_virtual_machine_of_any_process_is_listed() {
    let lab = Lab::new();
    let pid = std::process::id();
    let own = |list: &Value| -> Vec<Value> {
        let rows = list.as_array().expect("a list").iter();
        rows.filter(|row| row["pid"] == pid).cloned().collect()
    };
    assert_eq!(own(&lab.json(&["host", "list"])), Vec::<Value>::new());
    let kvm = match Kvm::new() {
        Ok(kvm) => kvm,
        Err(error) => {
            eprintln!("SKIPPED: /dev/kvm cannot be opened ({error})");
            return;
        }
    };
    let vm = kvm.create_vm().expect("a VM");
    let _vcpus = [0, 1].map(|id| vm.create_vcpu(id).expect("a vCPU"));
    let rows = own(&lab.json(&["host", "list"]));
    assert_eq!(rows.len(), 1, "{rows:?}");
    let row = &rows[0];
    assert_eq!(row["vcpus"], 2);
    let name = row["name"].as_str().expect("a name");
    assert!(name.ends_with(&format!("-{pid}")), "{row}");
    let reasons = row["reasons"].as_array().expect("reasons");
    let output = lab.run(&["host", "list"]);
    let table = String::from_utf8(output.stdout).expect("text");
    assert!(table.starts_with("NAME"), "{table}");
    let said = String::from_utf8(output.stderr).expect("text");
    match row.get("memory_bytes") {
        // The host's kernel tells that the VM has no memory yet.
        Some(bytes) => {
            assert_eq!((bytes, &row["dirty_logging"]), (&0.into(), &"off".into()));
            assert_eq!(row["attachable"], "no");
            assert!(reasons.iter().any(|why| why == "the guest has no memory"));
        }
        None => {
            assert_eq!(row["dirty_logging"], "unknown");
            assert_eq!(row["attachable"], "unknown");
            assert!(said.contains("cannot be read"), "{said}");
        }
    }
    drop((_vcpus, vm));
    assert_eq!(own(&lab.json(&["host", "list"])), Vec::<Value>::new());
}
