// SPDX-License-Identifier: Apache-2.0
// Shows keys × hosts as a grid with arrow-key navigation, and the holders of a key.

import { byId, clock, count, element, getJson, keyed, pager, setAttribute, setText, throttled } from "./dom.js";

/// The maximum number of hosts for which the cells are wide enough for numbers.
const FEW = 16;
let from = 0;
let focused = { row: 0, column: 0 };
let last = "";
let asked = null;

const refresh = throttled(1000, async () => {
  const heat = await getJson("/api/heat", { find: byId("heat-find").value, from });
  if (from >= heat.total) from = 0;
  show(heat);
});

export function showHeat(state) {
  const seen = `${state.observed} ${state.rollouts.map((one) => `${one.name} ${one.phase} ${one.counts.as_wanted} ${one.counts.unknown}`).join()}`;
  if (state.leads && seen !== last) refresh();
  last = seen;
}

function show(heat) {
  byId("heat-table").classList.toggle("few", heat.hosts.length <= FEW);
  const unknown = heat.unknown ? `, ${count(heat.unknown, "guest", "guests")} unknown` : "";
  const hosts = `${count(heat.total, "host", "hosts")}, ${heat.differing} with differences${unknown}`;
  const page = heat.hosts.length < heat.total ? `; ${heat.from + 1} to ${heat.from + heat.hosts.length} are shown` : "";
  setText(byId("heat-summary"), heat.keys.length ? `${hosts}${page}` : "No rollout names a key yet.");
  pager(byId("heat-pager"), heat.from, heat.hosts.length, heat.total, (to) => { from = to; refresh(); });
  const table = byId("heat-table");
  const rows = heat.keys.map((key, index) => ({ key, index }));
  if (!table.tHead) table.append(element("thead", {}, element("tr")), element("tbody"));
  const corner = { name: "", labels: {}, unreachable: "" };
  const head = (host) => element("th", { scope: "col" }, element("div", {}, host.name));
  keyed(table.tHead.rows[0], [corner, ...heat.hosts], (host) => `host ${host.name}`, head, (cell, host) => {
    const labels = Object.entries(host.labels).map(([label, value]) => `${label}=${value}`).join(", ");
    setAttribute(cell, "title", [host.name, labels, host.unreachable].filter(Boolean).join(" · "));
    cell.classList.toggle("unreachable", Boolean(host.unreachable));
  });
  focused.row = Math.min(focused.row, Math.max(0, rows.length - 1));
  focused.column = Math.min(focused.column, Math.max(0, heat.hosts.length - 1));
  const line = ({ key }) =>
    element("tr", {}, element("th", { scope: "row", title: key, "data-key": "host " }, key));
  keyed(table.tBodies[0], rows, ({ key }) => key, line, (row, { key, index }) => {
    const cells = heat.hosts.map((host) => ({ host, cell: host.cells[index] }));
    const create = () => element("td", { role: "gridcell" }, element("span", { "aria-hidden": "true" }));
    // `corner` stands for the row's header, which is kept because it has the same `data-key`.
    keyed(row, [{ host: corner }, ...cells], ({ host }) => `host ${host.name}`, create, (target, { host, cell }) => {
      if (cell) showCell(target, key, host, cell);
    });
  });
  [...table.querySelectorAll("td")].forEach((cell) => setAttribute(cell, "tabindex", -1));
  cellAt(focused.row, focused.column)?.setAttribute("tabindex", 0);
}

function showCell(target, key, host, cell) {
  const heat = cell.guests === 0 ? "none" : cell.on === 0 ? 0 : cell.on === cell.guests ? 4 : 1 + Math.min(2, Math.floor((3 * cell.on) / cell.guests));
  setAttribute(target, "data-heat", heat);
  setAttribute(target, "data-differs", cell.differs ? "yes" : "no");
  setAttribute(target, "data-unknown", host.unknown ? "yes" : "no");
  setText(target.firstElementChild, cell.guests ? `${cell.on}/${cell.guests}` : "");
  const wanted = cell.want_on || cell.want_off
    ? `; rollouts want it on in ${cell.want_on} and off in ${cell.want_off}` : "; no rollout states a wish";
  const differs = cell.differs ? `; ${cell.differs} differ: ${cell.names.join(", ")}` : "";
  const unknown = host.unknown ? `; ${count(host.unknown, "guest", "guests")} of the host unknown` : "";
  const has = cell.guests ? `on in ${cell.on} of ${count(cell.guests, "guest", "guests")}` : host.unreachable || "not known yet";
  setAttribute(target, "aria-label", `${key} on ${host.name}: ${has}${wanted}${differs}${unknown}`);
  setAttribute(target, "title", target.getAttribute("aria-label"));
  target.dataset.host = host.name;
  target.dataset.name = key;
}

const cellAt = (row, column) => byId("heat-table").tBodies[0]?.rows[row]?.cells[column + 1];

function move(row, column) {
  const next = cellAt(row, column);
  if (!next) return;
  cellAt(focused.row, focused.column)?.setAttribute("tabindex", -1);
  focused = { row, column };
  next.setAttribute("tabindex", 0);
  next.focus();
}

byId("heat-table").addEventListener("keydown", (event) => {
  const cell = event.target.closest("td");
  if (!cell) return;
  const [row, column] = [cell.parentElement.rowIndex - 1, cell.cellIndex - 1];
  const end = cell.parentElement.cells.length - 2;
  const moves = {
    ArrowLeft: [row, column - 1], ArrowRight: [row, column + 1],
    ArrowUp: [row - 1, column], ArrowDown: [row + 1, column], Home: [row, 0], End: [row, end],
  };
  const to = moves[event.key];
  if (to && to[0] >= 0 && to[1] >= 0) move(...to);
  else if (event.key === "Enter" || event.key === " ") showHolders(cell);
  if (to || event.key === "Enter" || event.key === " ") event.preventDefault();
});

byId("heat-table").addEventListener("click", (event) => {
  const cell = event.target.closest("td");
  if (!cell) return;
  move(cell.parentElement.rowIndex - 1, cell.cellIndex - 1);
  showHolders(cell);
});

async function showHolders(cell) {
  asked = cell;
  const { host, name } = cell.dataset;
  byId("holders").hidden = false;
  setText(byId("holders-title"), `Who holds ${name} on ${host}`);
  setText(byId("holders-note"), "Asking the guests.");
  byId("holders-title").focus();
  let found;
  try {
    found = await getJson("/api/holders", { host, key: name });
  } catch (error) {
    setText(byId("holders-note"), `The guests cannot be asked: ${error.message}`);
    return;
  }
  const rows = found.guests.flatMap((guest) => guest.holds.length ? guest.holds.map((hold) => [guest, hold]) : [[guest, null]]);
  byId("holders-table").tBodies[0].replaceChildren(...rows.map(([guest, hold]) => element("tr", {},
    element("th", { scope: "row" }, guest.guest), element("td", {}, guest.host),
    element("td", {}, guest.error || (guest.count === null ? "has no such key" : `${guest.enabled ? "on" : "off"}, count ${guest.count}`)),
    element("td", {}, hold ? hold.holder : "nobody"),
    element("td", { class: "number" }, hold ? String(hold.references) : ""),
    element("td", {}, hold ? hold.reason : ""),
    element("td", { class: "nowrap" }, hold?.expires ? clock(hold.expires) : hold ? "never" : ""))));
  const more = found.guests.length < found.total ? ` ${found.guests.length} of ${found.total} guests were asked.` : "";
  setText(byId("holders-note"), `${count(rows.filter(([, hold]) => hold).length, "hold", "holds")}.${more} ${found.unreachable.join("; ")}`);
}

byId("holders-close").addEventListener("click", () => {
  byId("holders").hidden = true;
  asked?.focus();
});

byId("heat-find").addEventListener("input", () => { from = 0; refresh(); });
