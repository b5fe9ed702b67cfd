// SPDX-License-Identifier: Apache-2.0
//! A fleet for demonstrations: 500 guests in memory on 50 hosts, a controller with its page, and a
//! rollout in waves, in which a guest is not yet as wanted and a host goes down for a while. Run it
//! as `demo [--keep]`. With `--keep` it does not undo the rollout and prints a link to the page,
//! which stays until Ctrl-C.

mod fleet;
mod page;

use self::fleet::Size;

const SIZE: Size = Size {
    guests: 500,
    hosts: 50,
    bake: "1s",
};

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let keep = match &std::env::args().skip(1).collect::<Vec<_>>()[..] {
        [] => false,
        [option] if option == "--keep" => true,
        other => anyhow::bail!("{other:?} is not known; the one option is --keep"),
    };
    let folder = std::env::temp_dir().join(format!("patchbay-fleet-demo-{}", std::process::id()));
    std::fs::create_dir(&folder)?;
    let result = tokio::select! {
        result = fleet::run(&folder, SIZE, keep, &|line| println!("{line}")) => result,
        interrupted = tokio::signal::ctrl_c() => Ok(interrupted?),
    };
    std::fs::remove_dir_all(&folder)?;
    result
}
