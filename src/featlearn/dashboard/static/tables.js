// Tables that can be sorted by their headers, which are buttons; on a phone each row is a card.

import { el, fill } from "./dom.js";
import { compareValues } from "./groups.js";

// Columns are {key, title, value(row) to sort by, cell(row) to show, number}; `state` stores the order between redraws.
export function sortable(columns, rows, state, redraw) {
  return tableOf(columns, ordered(columns, rows, state).map((row) => rowOf(columns, row)), state, redraw);
}

export function ordered(columns, rows, state) {
  const column = columns.find((one) => one.key === state.sort);
  if (!column?.value) return [...rows];
  return [...rows].sort((a, b) => compareValues(column.value(a), column.value(b), state.down ? -1 : 1));
}

export function rowOf(columns, row, properties = {}) {
  return el("tr", properties, columns.map((column) => cellOf(column, column.cell(row))));
}

export function cellOf(column, content) {
  const kinds = [column.number ? "number" : "", column.wide ? "wide-cell" : ""].join(" ").trim() || null;
  return el("td", { class: kinds, "data-title": column.title }, el("div", {}, content));
}

export function tableOf(columns, body, state, redraw) {
  const header = (column) => {
    if (!column.value) return el("th", { class: column.number ? "number" : null, scope: "col" }, column.head ?? column.title);
    const active = state.sort === column.key;
    const press = () => {
      state.down = active ? !state.down : Boolean(column.down);
      state.sort = column.key;
      redraw();
    };
    return el(
      "th", { class: column.number ? "number" : null, scope: "col", "aria-sort": active ? (state.down ? "descending" : "ascending") : "none" },
      el("button", { type: "button", class: "sort", "data-key": column.key, on: { click: press } }, column.title, el("span", { "aria-hidden": "true" }, active ? (state.down ? " ↓" : " ↑") : "")),
      column.extra ?? null,
    );
  };
  return el("div", { class: "wide" }, el("table", { class: "cards" }, el("thead", {}, el("tr", {}, columns.map(header))), el("tbody", {}, body)));
}

// Replaces a table or another element, and restores the focus on the control that was used.
export function replaceTable(place, table) {
  const key = place.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
  fill(place, table);
  if (key) place.querySelector(`[data-key="${CSS.escape(key)}"]`)?.focus();
}
