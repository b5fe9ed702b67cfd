// SPDX-License-Identifier: Apache-2.0
// Shows the buttons of a rollout. The server reports which are legal and allowed, and decides again when one is
// pressed. A disabled button stays in the focus order, so that its reason can be read.

import { byId, count, setAttribute, setText } from "./dom.js";

const buttons = [...document.querySelectorAll("[data-command]")];
let shown = null;

// Commands that send the digest of the plan that was shown.
const OF_A_PLAN = ["approve", "start"];

const QUESTIONS = {
  approve: (rollout) => ({
    text: `It changes ${count(rollout.counts.pending, "guest", "guests")} in ${count(rollout.waves.length, "wave", "waves")}. ${rollout.approvals.length} of ${rollout.approvals_needed} people have approved it. Nothing begins until somebody starts it.`,
    yes: "Approve",
  }),
  start: (rollout) => ({
    text: `Wave ${rollout.waves[0].name} begins at once: ${count(rollout.waves[0].guests, "guest", "guests")}. Only the keys of the plan are changed.`,
    yes: "Start",
  }),
  promote: (rollout) => ({
    text: `Promote ${effect(rollout, "promote")}. To take the changes back instead, use Undo.`,
    yes: rollout.gates.some((gate) => gate.state === "closed") ? "Skip the gate" : "Promote",
  }),
  abort: (rollout) => ({ text: backText(rollout), yes: "Abort and undo" }),
  undo: (rollout) => ({ text: backText(rollout), yes: "Undo" }),
};

function effect(rollout, command) {
  return rollout.next_steps.find((step) => step.command === command)?.effect
    ?? "begins the next wave at once, and skips the rest of the bake time and the gates";
}

function backText(rollout) {
  const { as_wanted, unknown, changing, not_yet } = rollout.counts;
  return `Every change is undone, on all guests at once: ${count(as_wanted + unknown + changing + not_yet, "guest is", "guests are")} changed, or may be. The undo ends when each of them has confirmed it.`;
}

export function showCommands(rollout) {
  shown = rollout;
  for (const button of buttons) {
    const command = rollout?.commands.find((one) => one.name === button.dataset.command);
    const enabled = command?.enabled ?? false;
    // Only commands that are legal in this phase are shown.
    button.hidden = !command?.legal;
    setAttribute(button, "aria-disabled", String(!enabled));
    if (command?.why) setAttribute(button, "title", command.why);
    else button.removeAttribute("title");
  }
}

async function send(name, command, digest) {
  const notice = byId("notice");
  try {
    const answer = await fetch(`/api/rollouts/${encodeURIComponent(name)}/${command}`, {
      method: "POST",
      headers: { "content-type": "application/json", "x-patchbay-request": "1" },
      body: JSON.stringify(digest ? { digest } : {}),
    });
    notice.hidden = answer.ok;
    if (!answer.ok) setText(notice, `${command} of ${name} was refused: ${(await answer.json()).error}`);
  } catch (error) {
    notice.hidden = false;
    setText(notice, `${command} of ${name} got no answer; look at its state before you try again`);
  }
}

/// Resolves to true if the user agrees.
function confirm(rollout, command, { text, yes }) {
  const dialog = byId("confirm");
  setText(byId("confirm-title"), `${command.charAt(0).toUpperCase()}${command.slice(1)} ${rollout.name}?`);
  setText(byId("confirm-text"), text);
  setText(byId("confirm-digest"), OF_A_PLAN.includes(command) ? `Digest of the plan: ${rollout.digest}` : "");
  setText(byId("confirm-yes"), yes);
  byId("confirm-yes").className = command === "abort" || command === "undo" ? "danger primary" : "primary";
  dialog.returnValue = "";
  dialog.showModal();
  byId("confirm-no").focus();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true });
  });
}

byId("confirm-no").addEventListener("click", () => byId("confirm").close(""));
byId("confirm-yes").addEventListener("click", () => byId("confirm").close("yes"));

for (const button of buttons) {
  button.addEventListener("click", async () => {
    // The user confirms the digest that was shown when the dialog opened.
    const rollout = shown;
    const command = button.dataset.command;
    if (!rollout || button.getAttribute("aria-disabled") === "true") return;
    const question = QUESTIONS[command]?.(rollout);
    if (question && !(await confirm(rollout, command, question))) return;
    await send(rollout.name, command, OF_A_PLAN.includes(command) ? rollout.digest : "");
    button.focus();
  });
}
