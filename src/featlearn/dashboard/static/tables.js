// Tables that can be sorted by their headers, which are buttons; on a phone each row is a card.

import { el, fill } from "./dom.js";

// Columns are {key, title, value(row) to sort by, cell(row) to show, number}; `state` stores the order between redraws.
export function sortable(columns, rows, state, redraw) {
  const column = columns.find((one) => one.key === state.sort);
  const ordered = [...rows];
  if (column) {
    const direction = state.down ? -1 : 1;
    ordered.sort((a, b) => compareValues(column.value(a), column.value(b), direction));
  }
  const header = (one) => {
    if (!one.value) return el("th", { class: one.number ? "number" : null }, one.title);
    const active = state.sort === one.key;
    const arrow = active ? (state.down ? " ↓" : " ↑") : "";
    const press = () => {
      state.down = active ? !state.down : Boolean(one.down);
      state.sort = one.key;
      redraw();
    };
    return el(
      "th", { class: one.number ? "number" : null, "aria-sort": active ? (state.down ? "descending" : "ascending") : "none" },
      el("button", { type: "button", class: "sort", "data-key": one.key, on: { click: press } }, `${one.title}${arrow}`),
    );
  };
  const row = (one) =>
    el("tr", {}, columns.map((c) => el("td", { class: [c.number ? "number" : "", c.wide ? "wide-cell" : ""].join(" ").trim() || null, "data-title": c.title }, el("div", {}, c.cell(one)))));
  return el(
    "div", { class: "wide" },
    el("table", { class: "cards" }, el("thead", {}, el("tr", {}, columns.map(header))), el("tbody", {}, ordered.map(row))),
  );
}

// What is not there comes last, whichever way the rest runs.
function compareValues(a, b, direction) {
  const [first, second] = [a ?? null, b ?? null];
  if (first === null || second === null) return (first === null) - (second === null);
  if (typeof first === "number" && typeof second === "number") return direction * (first - second);
  return direction * String(first).localeCompare(String(second), undefined, { numeric: true });
}

// Replaces a table, and restores the focus on the button that was pressed.
export function replaceTable(place, table) {
  const key = place.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
  fill(place, table);
  if (key) place.querySelector(`[data-key="${CSS.escape(key)}"]`)?.focus();
}
