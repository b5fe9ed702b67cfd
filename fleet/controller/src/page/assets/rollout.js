// SPDX-License-Identifier: Apache-2.0
// Shows a rollout: its head, the progress of its waves, and how long its guests were stopped.

import { byId, clock, count, element, keyed, micros, seconds, setAttribute, setText } from "./dom.js";

const PARTS = ["as_wanted", "unknown", "adopted", "changing", "not_yet", "releasing", "released", "forgotten"];

export function showRollout(rollout, skew) {
  byId("rollout").hidden = !rollout;
  document.title = rollout ? `${rollout.name}: ${rollout.phase} – Patchbay fleet` : "Patchbay fleet";
  if (!rollout) return;
  setText(byId("rollout-name"), rollout.name);
  setText(byId("phase"), rollout.phase);
  setAttribute(byId("phase"), "data-phase", rollout.phase);
  setText(byId("title"), rollout.title);
  showSafety(rollout);
  showFacts(rollout);
  const frozen = rollout.frozen ? ` Frozen: ${rollout.frozen}.` : "";
  setText(byId("message"), `${sentence(rollout.message || rollout.phase)} Planned ${clock(rollout.created)}.${frozen}`);
  showWaves(rollout, skew);
  showPauses(rollout.pauses);
}

function sentence(text) {
  return `${text.charAt(0).toUpperCase()}${text.slice(1)}.`;
}

/// Shows whether the guests are safe. The text must be clear without the colour.
function showSafety(rollout) {
  const { level, text, since } = rollout.safety;
  setAttribute(byId("safety"), "data-level", level);
  setAttribute(byId("phase"), "data-level", level);
  setText(byId("safety"), since ? `${text} The first since ${clock(since)}.` : text);
}

function showFacts(rollout) {
  const keys = rollout.keys.map(({ want, count: total, names }) => {
    const shown = names.slice(0, 8).join(", ");
    return `${want}: ${shown}${total > 8 ? ` and ${total - 8} more` : ""}`;
  });
  setText(byId("facts-keys"), keys.join("; ") || "not known");
  const hosts = rollout.hosts;
  const guests = rollout.waves.reduce((sum, wave) => sum + wave.guests, 0);
  setText(byId("facts-guests"), `${rollout.counts.as_wanted} of ${count(guests, "guest", "guests")} on ${count(hosts, "host", "hosts")} as wanted`);
  const by = rollout.approvals.length ? `: ${rollout.approvals.join(", ")}` : "";
  setText(byId("facts-approvals"), `${rollout.approvals.length} of ${rollout.approvals_needed}${by}`);
  setText(byId("facts-digest"), rollout.digest);
  const given = rollout.gates.length ? rollout.gates : [{ text: "the spec has none", state: "", message: "", asked: null }];
  const gates = given.map((one, index) => ({ ...one, index }));
  const gate = () => element("li", {}, element("span", { class: "result" }), " ", element("span", { class: "text" }));
  keyed(byId("gates"), gates, (one) => one.index, gate, (item, one) => {
    const asked = one.asked ? `, asked ${clock(one.asked)}` : "";
    const why = one.message ? `: ${one.message}` : "";
    item.dataset.state = one.state;
    setText(item.querySelector(".result"), one.state);
    setText(item.querySelector(".text"), `${one.text}${asked}${why}`);
  });
  const steps = rollout.next_steps.length ? rollout.next_steps : [{ command: "wait", effect: "for the guests; you need not do anything" }];
  const step = () => element("li", {}, element("b"), " ", element("span"));
  keyed(byId("next"), steps, (one) => one.command, step, (item, one) => {
    setText(item.querySelector("b"), one.command);
    setText(item.querySelector("span"), one.effect);
  });
}

function showWaves(rollout, skew) {
  const waves = rollout.waves.map((wave, index) => ({ ...wave, index }));
  const create = () => {
    const track = element("div", { class: "track", role: "progressbar", "aria-valuemin": 0 });
    track.append(...PARTS.map((part) => element("span", { "data-part": part })));
    track.append(element("span", { "data-part": "pending" }));
    const bar = element("div", { class: "bar-of" }, track);
    return element("li", {}, element("span", { class: "name" }), bar, element("span", { class: "what" }), element("ul", { class: "troubled" }));
  };
  const most = Math.max(1, ...waves.map((wave) => wave.guests));
  keyed(byId("waves"), waves, (wave) => wave.index, create, (item, wave) => {
    const { counts, guests } = wave;
    setText(item.querySelector(".name"), wave.name);
    const track = item.querySelector(".track");
    track.style.width = `${(100 * guests) / most}%`;
    for (const part of PARTS) {
      track.querySelector(`[data-part=${part}]`).style.flexGrow = counts[part];
    }
    track.querySelector("[data-part=pending]").style.flexGrow = counts.pending;
    setAttribute(track, "aria-valuemax", guests);
    setAttribute(track, "aria-valuenow", counts.as_wanted);
    setAttribute(track, "aria-label", `Wave ${wave.name}`);
    setAttribute(track, "aria-valuetext",
      `${counts.as_wanted} of ${guests} as wanted, ${counts.unknown} unknown, ${counts.not_yet} not yet, ${counts.releasing} being released, ${counts.released} released, ${counts.forgotten} forgotten, ${counts.adopted} adopted`);
    item.dataset.state = wave.state;
    showWhat(item.querySelector(".what"), wave, skew);
    showTroubled(item.querySelector(".troubled"), wave);
  });
}

/// Shows the guests below their wave for which the rollout waits, since when, and why.
function showTroubled(target, wave) {
  const more = { host: "", guest: "", more: wave.more_troubled };
  const items = wave.more_troubled ? [...wave.troubled, more] : wave.troubled;
  const create = () => element("li", {}, element("b", { class: "state" }), element("span"));
  keyed(target, items, (one) => `${one.host} ${one.guest}`, create, (item, one) => {
    const since = one.since ? ` since ${clock(one.since)}` : "";
    const text = one.more ? `and ${one.more} more` : ` ${one.guest} on ${one.host}${since}: ${one.message}`;
    setText(item.firstElementChild, one.more ? "" : one.state);
    setAttribute(item.firstElementChild, "data-state", one.more ? "" : one.state);
    setText(item.lastElementChild, text);
  });
}

function showWhat(target, wave, skew) {
  const { counts } = wave;
  const parts = [element("b", {}, String(counts.as_wanted)), ` of ${count(wave.guests, "guest", "guests")} on ${count(wave.hosts, "host", "hosts")} as wanted`];
  if (counts.unknown) parts.push(" · ", element("span", { class: "doubt" }, `${counts.unknown} unknown`));
  if (counts.not_yet) parts.push(" · ", element("span", { class: "bad" }, `${counts.not_yet} not yet`));
  if (counts.releasing) parts.push(` · ${counts.releasing} being released`);
  if (counts.released) parts.push(` · ${counts.released} released`);
  if (counts.forgotten) parts.push(` · ${counts.forgotten} forgotten`);
  if (counts.adopted) parts.push(` · ${counts.adopted} adopted`);
  if (wave.bakes_until) parts.push(` · bakes for ${seconds(wave.bakes_until - Date.now() - skew)}`);
  else if (wave.state) parts.push(` · ${wave.state}`);
  else if (wave.bake_ms) parts.push(` · then bakes ${seconds(wave.bake_ms)}`);
  const text = parts.map((part) => part.textContent ?? part).join("");
  if (target.textContent !== text) target.replaceChildren(...parts);
}

/// Counts the bake time down between events.
export function tick(rollout, skew) {
  if (!rollout) return;
  rollout.waves.forEach((wave, index) => {
    const item = byId("waves").children[index];
    if (wave.bakes_until && item) showWhat(item.querySelector(".what"), wave, skew);
  });
}

function showPauses(pauses) {
  const over = (us) => pauses.budget_us !== null && us > pauses.budget_us;
  const figures = [
    ["median", pauses.p50_us, false],
    ["99th percentile", pauses.p99_us, over(pauses.p99_us)],
    ["longest", pauses.max_us, false],
  ];
  if (pauses.budget_us !== null) figures.push(["budget", pauses.budget_us, false]);
  const create = () => element("div", {}, element("dt"), element("dd"));
  keyed(byId("pause-figures"), figures, ([name]) => name, create, (item, [name, us, isOver]) => {
    setText(item.firstElementChild, name);
    setText(item.lastElementChild, pauses.count ? micros(us) : "–");
    setAttribute(item.lastElementChild, "data-over", isOver ? "yes" : "no");
  });
  const used = pauses.buckets.map(([, number]) => number > 0);
  const first = Math.max(0, Math.min(used.indexOf(true) - 2, 9));
  const last = Math.min(pauses.buckets.length - 1, Math.max(used.lastIndexOf(true) + 1, first + 8));
  const shown = pauses.buckets.slice(first, last + 1).map(([bound, number], index) => ({ bound, number, below: pauses.buckets[first + index - 1]?.[0] ?? 0 }));
  const most = Math.max(1, ...shown.map((bucket) => bucket.number));
  const column = () =>
    element("div", {}, element("span", { class: "count" }), element("div", { class: "column" }), element("span", { class: "bound" }));
  keyed(byId("pauses"), shown, (bucket) => bucket.bound, column, (item, bucket) => {
    setText(item.querySelector(".count"), bucket.number || "");
    item.querySelector(".column").style.height = `${(bucket.number * 76) / most}px`;
    setText(item.querySelector(".bound"), bucket.bound === null ? "more" : micros(bucket.bound));
    item.classList.toggle("over", over(bucket.below + 1) || (bucket.bound === null && pauses.budget_us !== null));
  });
  const text = pauses.count
    ? `${count(pauses.count, "guest was", "guests were")} stopped; each column counts pauses up to its bound.`
    : "No guest has been stopped yet.";
  setText(byId("pauses-text"), text);
}
