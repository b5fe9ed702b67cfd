// SPDX-License-Identifier: Apache-2.0
// Shows the guests of the rollout, the reason for each guest's state, and the audit trail.

import { byId, clock, count, element, getJson, keyed, micros, pager, setAttribute, setText, throttled } from "./dom.js";

let rollout = "";
let from = 0;
let seen = "";
/// The texts for guests without a message of their own, by state.
const WAITS = { releasing: "has not yet confirmed that its claims have ended" };
/// The guests whose reasons are shown.
const open = new Set();

const refreshGuests = throttled(700, async () => {
  if (!rollout) return;
  const find = byId("guests-find").value;
  const guests = await getJson("/api/guests", { rollout, find, state: byId("guests-state").value, from });
  if (from > 0 && guests.rows.length === 0) { from = 0; refreshGuests(); }
  showGuests(guests);
});

const refreshTrail = throttled(700, async () => {
  showTrail(await getJson("/api/trail", { find: byId("trail-find").value }));
});

export function showTables(state) {
  byId("guests").hidden = !state.rollout;
  if (!state.leads) return;
  const name = state.rollout?.name ?? "";
  if (name !== rollout) {
    [rollout, from] = [name, 0];
    open.clear();
  }
  const now = JSON.stringify([state.rollouts, state.rollout?.timeline.length, name]);
  if (now === seen) return;
  seen = now;
  refreshGuests();
  refreshTrail();
}

function showGuests(guests) {
  const to = guests.from + guests.rows.length;
  const page = guests.rows.length < guests.total ? `${guests.from + 1} to ${to} of ${guests.total}` : count(guests.total, "guest", "guests");
  setText(byId("guests-summary"), page);
  pager(byId("guests-pager"), guests.from, guests.rows.length, guests.total, (next) => { from = next; refreshGuests(); });
  const create = () => element("tr", {},
    element("th", { scope: "row", class: "name" }), element("td", { class: "name" }), element("td", { class: "name" }), element("td", { class: "nowrap" }, element("span", { class: "state" })),
    element("td", { class: "number nowrap" }), element("td", { class: "long" }, element("span", { class: "text" }), " ", whyButton(), element("div", { class: "reasons" })));
  keyed(byId("guests-rows"), guests.rows, (row) => row.index, create, (item, row) => {
    const [guest, host, wave, state, pause, why] = item.cells;
    item.dataset.guest = row.guest;
    item.dataset.host = row.host;
    const names = [[guest, row.guest], [host, row.host], [wave, row.wave ?? "none"]];
    for (const [cell, name] of names) {
      setText(cell, name);
      // A long name is cut.
      setAttribute(cell, "title", name);
    }
    setText(state.firstElementChild, row.state);
    setAttribute(state.firstElementChild, "data-state", row.state);
    setText(pause, row.pause_us === null ? "" : micros(row.pause_us));
    const since = row.since ? `since ${clock(row.since)}: ` : "";
    setText(why.querySelector(".text"), `${since}${row.message || WAITS[row.state] || ""}`);
    setAttribute(why.querySelector("button"), "aria-label", `Why is ${row.guest} on ${row.host} ${row.state}?`);
    if (open.has(item.dataset.key)) explain(item);
    else setReasons(item, null);
  });
}

function whyButton() {
  const button = element("button", { type: "button", class: "why", "aria-expanded": "false" }, "Why?");
  button.addEventListener("click", () => {
    const item = button.closest("tr");
    if (open.delete(item.dataset.key)) {
      setReasons(item, null);
    } else {
      open.add(item.dataset.key);
      explain(item);
    }
  });
  return button;
}

async function explain(item) {
  const { host, guest } = item.dataset;
  try {
    const reasons = await getJson("/api/explain", { rollout, host, guest });
    if (open.has(item.dataset.key)) setReasons(item, reasons.join("; "));
  } catch (error) {
    setReasons(item, error.message);
  }
}

function setReasons(item, text) {
  setAttribute(item.querySelector("button"), "aria-expanded", String(text !== null));
  setText(item.querySelector(".reasons"), text ?? "");
}

function showTrail(trail) {
  const shown = trail.rows.length < trail.total ? `the newest ${trail.rows.length} of ${trail.total}` : count(trail.total, "entry", "entries");
  setText(byId("trail-summary"), shown);
  byId("trail-rows").replaceChildren(...trail.rows.map((row) => element("tr", {},
    element("td", { class: "nowrap" }, clock(row.time)), element("td", { class: "name", title: row.principal }, row.principal || "controller"),
    element("td", { class: "name" }, row.rollout), element("td", { class: "long" }, row.text))));
}

byId("guests-find").addEventListener("input", () => { from = 0; refreshGuests(); });
byId("guests-state").addEventListener("change", () => { from = 0; refreshGuests(); });
byId("trail-find").addEventListener("input", () => refreshTrail());
