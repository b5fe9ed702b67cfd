// SPDX-License-Identifier: Apache-2.0
//! Parses the command line of `patchbay rollout`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use crate::args::output::{OutputArgument, rollout_format_parser};
use crate::complete;

#[derive(Debug, Args)]
pub struct RolloutArgs {
    #[command(subcommand)]
    pub command: RolloutCommand,
}

#[derive(Clone, Debug, Subcommand)]
pub enum RolloutCommand {
    /// Plan a change of every guest that a spec selects, and show the plan. This changes nothing.
    Plan {
        /// The spec, in YAML; `-` reads standard input.
        spec: PathBuf,
        /// Name of the rollout; default: the spec's file name. Required with standard input.
        #[arg(long)]
        name: Option<String>,
    },
    /// Compare a spec with the rollout of this name, which has not ended, and show the differences.
    /// The exit code is 4 if there are any. This changes nothing.
    Diff {
        /// The spec, in YAML; `-` reads standard input.
        spec: PathBuf,
        /// Name of the rollout; default: the spec's file name. Required with standard input.
        #[arg(long, add = complete::rollouts())]
        name: Option<String>,
    },
    /// Approve a plan that another person will start.
    Approve(Reviewed),
    /// Start a plan that was reviewed.
    Start {
        #[command(flatten)]
        reviewed: Reviewed,
        /// Start it without the required approvals. This needs the role break-glass, is recorded in
        /// the audit log, and raises an alert.
        #[arg(long)]
        break_glass: bool,
    },
    /// Show a rollout.
    Status {
        #[arg(add = complete::rollouts())]
        rollout: String,
        /// Show changes until the rollout ends. On a terminal the status is redrawn. Otherwise only
        /// lines that have changed are printed. This reconnects if the controller restarts or
        /// another replica becomes the leader.
        #[arg(long)]
        watch: bool,
        /// Format of the output; `wide` also shows every guest and up to 50 keys for each wanted
        /// state.
        #[arg(short, long, default_value = "table", value_name = "FORMAT", value_parser = rollout_format_parser())]
        output: OutputArgument,
    },
    /// Show the timeline of a rollout: commands with their persons, phases, waves, results of
    /// gates, and drift.
    History {
        #[arg(add = complete::rollouts())]
        rollout: String,
    },
    /// Pause the rollout: no further change is started.
    Pause {
        #[arg(add = complete::rollouts())]
        rollout: String,
    },
    /// Continue, and wait again for the guests that are not yet as wanted.
    Resume {
        #[arg(add = complete::rollouts())]
        rollout: String,
    },
    /// Skip the rest of the bake time and the gates of the wave, even if one of them is closed, and
    /// continue with the next wave. Use `undo` to take the changes back instead.
    Promote {
        #[arg(add = complete::rollouts())]
        rollout: String,
        /// Promote it although the policy demands approvals for its keys. This needs the role
        /// break-glass, is recorded in the audit log, and raises an alert.
        #[arg(long)]
        break_glass: bool,
    },
    /// End the rollout and undo all its changes. It has ended when each guest has confirmed this.
    Abort {
        #[arg(add = complete::rollouts())]
        rollout: String,
    },
    /// Undo all changes of a rollout. The undo ends when each guest has confirmed this.
    Undo {
        #[arg(add = complete::rollouts())]
        rollout: String,
    },
    /// Give up a guest that is or may be changed, not yet as wanted, or being released. The rollout
    /// does not wait for the guest any more, and sends it nothing. The guest may keep the change.
    Forget {
        #[arg(add = complete::rollouts())]
        rollout: String,
        /// The name of the guest.
        name: String,
        /// Host of the guest; needed if several hosts have a guest of this name.
        #[arg(long, default_value = "")]
        host: String,
    },
    /// Delete a rollout that is over and whose changes no guest has. The controller first writes it
    /// to a file in its --archive folder.
    Delete {
        #[arg(add = complete::rollouts())]
        rollout: String,
        /// Delete it although it cannot be read. Its guests stay as they are.
        #[arg(long)]
        unreadable: bool,
    },
    /// Explain why a guest is in its phase of the rollout, and what would change it.
    Explain {
        #[arg(add = complete::rollouts())]
        rollout: String,
        /// The name of the guest.
        name: String,
        /// Host of the guest; needed if several hosts have a guest of this name.
        #[arg(long, default_value = "")]
        host: String,
    },
    /// List rollouts, the newest first.
    List {
        /// Format of the output; `wide` shows more columns.
        #[arg(short, long, default_value = "table", value_name = "FORMAT", value_parser = rollout_format_parser())]
        output: OutputArgument,
    },
    /// Compare the guests with the state that the rollout set. The exit code is 4 if they differ,
    /// and 3 if they do not but guests still wait in a wave that --fix or a late guest has added.
    Drift {
        #[arg(add = complete::rollouts())]
        rollout: String,
        /// Change the drifted guests, and those that joined after the plan, in additional waves.
        /// They are cut as the spec says, and have its caps, bake times and gates.
        #[arg(long, conflicts_with = "adopt")]
        fix: bool,
        /// Accept the drifted guests' present state.
        #[arg(long)]
        adopt: bool,
    },
    /// List the hosts that the controller knows.
    Hosts,
}

#[derive(Clone, Debug, Args)]
pub struct Reviewed {
    #[arg(add = complete::rollouts())]
    pub rollout: String,
    /// The digest that `plan` showed.
    #[arg(long)]
    pub digest: String,
}
