// SPDX-License-Identifier: Apache-2.0
// Follows the events of the controller and passes the state to the parts of the page.

import { byId, count, element, keyed, setAttribute, setText } from "./dom.js";
import { showRollout, tick } from "./rollout.js";
import { showCommands } from "./commands.js";
import { showHeat } from "./heat.js";
import { showTables } from "./tables.js";

let state = null;
let events = null;
/// The reason why the server ended the events.
let refusal = "";
/// The server's clock minus the browser's.
let skew = 0;

const chosen = () => decodeURIComponent(location.hash.replace(/^#rollout=/, "").replace(/^#.*/, ""));

function follow() {
  if (events) events.close();
  const query = chosen() ? `?rollout=${encodeURIComponent(chosen())}` : "";
  events = new EventSource(`/api/events${query}`);
  events.onopen = () => live(true);
  events.onerror = () => {
    live(false);
    // A browser does not reconnect after an answer that is not a stream, so this reconnects.
    if (events.readyState === EventSource.CLOSED) setTimeout(follow, 2000);
  };
  events.addEventListener("refused", (event) => {
    refusal = JSON.parse(event.data);
    live(false);
  });
  events.onmessage = (event) => {
    refusal = "";
    state = JSON.parse(event.data);
    skew = state.now - Date.now();
    live(true);
    show();
  };
}

function live(is) {
  const lost = refusal ? `not allowed any more: ${refusal}` : "connection lost, trying again";
  const text = is ? (state && !state.leads ? "not leading" : "live") : lost;
  setText(byId("live"), text);
  setAttribute(byId("live"), "data-live", is ? "yes" : "no");
}

function show() {
  setText(byId("principal"), state.principal);
  const notice = byId("notice");
  notice.hidden = state.leads && state.unreadable.length === 0;
  const unreadable = state.unreadable.map((one) => `Rollout ${one.name} cannot be read and stands: ${one.why}.`).join(" ");
  setText(notice, state.leads ? unreadable : `No rollouts are shown: ${state.why_not}.`);
  // If no rollout is chosen, the newest is shown.
  if (!state.rollout && !chosen() && state.rollouts.length > 0) {
    history.replaceState(null, "", `#rollout=${encodeURIComponent(state.rollouts[0].name)}`);
    follow();
  }
  showList();
  showRollout(state.rollout, skew);
  showCommands(state.rollout);
  showHeat(state);
  showTables(state);
}

function showList() {
  const find = byId("rollout-find").value;
  const wanted = state.rollouts.filter((one) => `${one.name} ${one.title} ${one.phase}`.includes(find));
  byId("no-rollouts").hidden = state.rollouts.length > 0 || !state.leads;
  byId("no-match").hidden = wanted.length > 0 || state.rollouts.length === 0;
  const create = () =>
    element("li", {}, element("a", {},
      element("span", { class: "line" }, element("span", { class: "name" }), element("span", { class: "phase" })),
      element("span", { class: "hint" }), element("span", { class: "waits" }), element("span", { class: "needs" })));
  keyed(byId("rollouts"), wanted, (one) => one.name, create, (item, one) => {
    const link = item.firstElementChild;
    const { skipped, ...counts } = one.counts;
    const guests = Object.values(counts).reduce((sum, number) => sum + number, 0);
    setAttribute(link, "href", `#rollout=${encodeURIComponent(one.name)}`);
    setAttribute(link, "aria-current", String(state.rollout?.name === one.name));
    setText(link.querySelector(".name"), one.name);
    setText(link.querySelector(".phase"), one.phase);
    setText(link.querySelector(".hint"), `${counts.as_wanted} of ${count(guests, "guest", "guests")} as wanted`);
    const waits = [[counts.not_yet, "not yet"], [counts.unknown, "unknown"]].filter(([number]) => number);
    setText(link.querySelector(".waits"), waits.map(([number, what]) => ` · ${number} ${what}`).join(""));
    setText(link.querySelector(".needs"), one.needs ? `needs you: ${one.needs}` : "");
  });
}

addEventListener("hashchange", () => {
  // Skip links do not choose a rollout.
  if (location.hash.startsWith("#rollout=")) follow();
});
byId("rollout-find").addEventListener("input", () => state && showList());
setInterval(() => tick(state?.rollout, skew), 500);
follow();
