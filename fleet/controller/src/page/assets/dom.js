// SPDX-License-Identifier: Apache-2.0
// Small helpers. They add text only as text nodes, because names come from guests.

export const byId = (id) => document.getElementById(id);

/// Creates an element with attributes and children. A child that is not an element becomes text.
export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== undefined && value !== null) made.setAttribute(key, value);
  }
  made.append(...children.filter((child) => child !== undefined && child !== null));
  return made;
}

/// Sets text only if it differs, so that live regions announce only changes.
export function setText(target, text) {
  if (target.textContent !== String(text)) target.textContent = text;
}

export function setAttribute(target, name, value) {
  if (target.getAttribute(name) !== String(value)) target.setAttribute(name, value);
}

/// Replaces the children of `parent` by those of `items`. Elements whose key is still present are
/// kept, so that focus and transitions are preserved.
export function keyed(parent, items, key, create, update) {
  const known = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  let position = parent.firstElementChild;
  for (const item of items) {
    const name = String(key(item));
    let child = known.get(name);
    known.delete(name);
    if (!child) {
      child = create(item);
      child.dataset.key = name;
    }
    if (child === position) position = position.nextElementSibling;
    else parent.insertBefore(child, position);
    update(child, item);
  }
  for (const left of known.values()) left.remove();
}

export async function getJson(path, fields = {}) {
  const query = new URLSearchParams(fields);
  const answer = await fetch(`${path}?${query}`, { headers: { accept: "application/json" } });
  const body = await answer.json();
  if (!answer.ok) throw new Error(body.error);
  return body;
}

export function micros(us) {
  if (us < 1000) return `${us} µs`;
  if (us < 1000000) return `${round(us / 1000)} ms`;
  return `${round(us / 1000000)} s`;
}

function round(number) {
  return number < 10 ? Math.round(number * 10) / 10 : Math.round(number);
}

export function seconds(ms) {
  const total = Math.max(0, Math.ceil(ms / 1000));
  if (total < 60) return `${total} s`;
  if (total < 3600) return `${Math.floor(total / 60)} min ${total % 60} s`;
  return `${Math.floor(total / 3600)} h ${Math.floor((total % 3600) / 60)} min`;
}

/// Formats local time as 2026-11-22 14:33:41 +01:00 in every locale.
export function clock(ms) {
  const offset = -new Date(ms).getTimezoneOffset();
  const local = new Date(ms + offset * 60000);
  const digits = (number) => String(Math.floor(number)).padStart(2, "0");
  const zone = offset === 0 ? "UTC"
    : `${offset < 0 ? "-" : "+"}${digits(Math.abs(offset) / 60)}:${digits(Math.abs(offset) % 60)}`;
  return `${local.toISOString().slice(0, 19).replace("T", " ")} ${zone}`;
}

export function count(number, one, many) {
  return `${number} ${number === 1 ? one : many}`;
}

/// Runs `work` at most once per interval, and once more if it was requested meanwhile.
export function throttled(interval, work) {
  let timer = null;
  let again = false;
  const run = async () => {
    again = false;
    timer = setTimeout(() => {
      timer = null;
      if (again) run();
    }, interval);
    try {
      await work();
    } catch (error) {
      // The server is unreachable, which the stream of events reports.
      if (!(error instanceof TypeError)) throw error;
    }
  };
  return () => {
    if (timer === null) run();
    else again = true;
  };
}

/// Creates the buttons "Back" and "Next" of a table.
export function pager(target, from, shown, total, go) {
  const step = Math.max(shown, 1);
  const pages = [
    { name: "Back", to: Math.max(0, from - step), enabled: from > 0 },
    { name: "Next", to: from + shown, enabled: from + shown < total },
  ];
  target.hidden = pages.every((page) => !page.enabled);
  const create = (page) => element("button", { type: "button" }, page.name);
  keyed(target, pages, (page) => page.name, create, (button, page) => {
    setAttribute(button, "aria-disabled", String(!page.enabled));
    button.onclick = () => page.enabled && go(page.to);
  });
}
