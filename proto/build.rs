// SPDX-License-Identifier: Apache-2.0
//! Compiles the .proto files without a protoc on the machine.

use std::path::PathBuf;

use prost::Message;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let files = ["patchbay/v1/guest.proto", "patchbay/v1/static_keys.proto"];
    println!("cargo:rerun-if-changed=patchbay");

    let descriptors = protox::compile(files, ["."])?;
    let out = PathBuf::from(std::env::var("OUT_DIR")?);
    std::fs::write(out.join("patchbay.v1.bin"), descriptors.encode_to_vec())?;
    tonic_prost_build::compile_fds(descriptors)?;
    Ok(())
}
