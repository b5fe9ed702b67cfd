// SPDX-License-Identifier: Apache-2.0
//! Compiles the .proto files without a protoc on the machine.

type Outcome = Result<(), Box<dyn std::error::Error>>;

fn main() -> Outcome {
    println!("cargo:rerun-if-changed=patchbay");
    generate()
}

/// Services and messages, and their description for the reflection service.
#[cfg(feature = "grpc")]
fn generate() -> Outcome {
    use prost::Message;

    let files = [
        "patchbay/v1/agent.proto",
        "patchbay/v1/guest.proto",
        "patchbay/v1/static_keys.proto",
        "patchbay/v1/tracepoints.proto",
    ];
    let descriptors = protox::compile(files, ["."])?;
    let out = std::path::PathBuf::from(std::env::var("OUT_DIR")?);
    std::fs::write(out.join("patchbay.v1.bin"), descriptors.encode_to_vec())?;
    tonic_prost_build::compile_fds(descriptors)?;
    Ok(())
}

/// What the agent needs.
#[cfg(not(feature = "grpc"))]
fn generate() -> Outcome {
    let descriptors = protox::compile(["patchbay/v1/agent.proto"], ["."])?;
    prost_build::compile_fds(descriptors)?;
    Ok(())
}
