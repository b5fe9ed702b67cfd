// SPDX-License-Identifier: Apache-2.0
//! Compiles the .proto files without a protoc on the machine.

#[cfg(feature = "grpc")]
mod methods;

type BuildResult = Result<(), Box<dyn std::error::Error>>;

const AGENT: [&str; 2] = [
    "patchbay/agent/v1/agent.proto",
    "patchbay/agent/v1/exec.proto",
];
#[cfg(feature = "grpc")]
const FLEET: [&str; 2] = [
    "patchbay/fleet/v1/fleet.proto",
    "patchbay/fleet/v1/assertion.proto",
];

fn main() -> BuildResult {
    println!("cargo:rerun-if-changed=build");
    println!("cargo:rerun-if-changed=patchbay");
    generate()
}

/// Generates the services and messages, their description for the reflection service, and the table
/// of the methods.
#[cfg(feature = "grpc")]
fn generate() -> BuildResult {
    let guests = [
        "patchbay/v1/errors.proto",
        "patchbay/v1/guest.proto",
        "patchbay/v1/static_keys.proto",
        "patchbay/v1/tracepoints.proto",
    ];
    let mut compiler = protox::Compiler::new(["."])?;
    compiler
        .include_imports(true)
        .include_source_info(true)
        .open_files(guests)?;
    let out = std::path::PathBuf::from(std::env::var("OUT_DIR")?);
    let encoded = compiler.encode_file_descriptor_set();
    std::fs::write(out.join("patchbay.v1.bin"), encoded)?;
    let methods = methods::table(&compiler.descriptor_pool())?;
    std::fs::write(out.join("methods.rs"), methods)?;
    let compile = |files| {
        let services = tonic_prost_build::configure().codec_path("crate::codec::MessageCodec");
        services.compile_fds(files)
    };
    compile(compiler.file_descriptor_set())?;
    compile(protox::compile(FLEET, ["."])?)?;
    compile(protox::compile(AGENT, ["."])?)?;
    Ok(())
}

/// Generates the messages that the agent needs.
#[cfg(not(feature = "grpc"))]
fn generate() -> BuildResult {
    prost_build::compile_fds(protox::compile(AGENT, ["."])?)?;
    Ok(())
}
