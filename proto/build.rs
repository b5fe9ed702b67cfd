// SPDX-License-Identifier: Apache-2.0
//! Compiles the .proto files without a protoc on the machine.

type BuildResult = Result<(), Box<dyn std::error::Error>>;

const AGENT: [&str; 2] = [
    "patchbay/agent/v1/agent.proto",
    "patchbay/agent/v1/exec.proto",
];
#[cfg(feature = "grpc")]
const FLEET: &str = "patchbay/fleet/v1/fleet.proto";

fn main() -> BuildResult {
    println!("cargo:rerun-if-changed=patchbay");
    generate()
}

/// Services and messages, and their description for the reflection service.
#[cfg(feature = "grpc")]
fn generate() -> BuildResult {
    use prost::Message;

    let guests = [
        "patchbay/v1/errors.proto",
        "patchbay/v1/guest.proto",
        "patchbay/v1/static_keys.proto",
        "patchbay/v1/tracepoints.proto",
    ];
    let descriptors = protox::compile(guests, ["."])?;
    let out = std::path::PathBuf::from(std::env::var("OUT_DIR")?);
    std::fs::write(out.join("patchbay.v1.bin"), descriptors.encode_to_vec())?;
    tonic_prost_build::compile_fds(descriptors)?;
    tonic_prost_build::compile_fds(protox::compile([FLEET], ["."])?)?;
    tonic_prost_build::compile_fds(protox::compile(AGENT, ["."])?)?;
    Ok(())
}

/// What the agent needs.
#[cfg(not(feature = "grpc"))]
fn generate() -> BuildResult {
    prost_build::compile_fds(protox::compile(AGENT, ["."])?)?;
    Ok(())
}
