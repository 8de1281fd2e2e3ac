// Columns of the list of runs, and rows that stand for groups.

import { el } from "./dom.js";
import { cut, duration, exactMoment, moment, plainValue, short } from "./format.js";
import { spreadOf } from "./groups.js";
import { chip } from "./strips.js";
import { cellOf } from "./tables.js";

export function statusBadge(status) {
  return el("span", { class: `status s-${/^[a-z]+$/.test(status) ? status : "unknown"}` }, status);
}

export function settingsText(run) {
  const pairs = Object.entries(run.settings ?? {}).filter(([name]) => !["features", "kind"].includes(name));
  return cut(pairs.slice(0, 6).map(([name, value]) => `${name} ${cut(plainValue(value), 24)}`).join(", "), 90);
}

function readingChips(run) {
  const chips = Object.entries(run.readings ?? {}).map(([word, count]) => el("span", { class: "chip-count" }, count > 1 ? `${count} × ` : "", chip(word)));
  return chips.length ? el("span", { class: "chips" }, chips) : run.kind === "rfm" ? "feature machine" : "–";
}

// The folder above a run that is named like its own folder, otherwise the whole path.
function folderOf(run) {
  return run.path.endsWith(`/${run.name}`) ? run.path.slice(0, -run.name.length - 1) : run.path;
}

// `picks` has the chosen runs, and the functions toggle(run, on) and remove(column).
export function columnsOf(fields, runs, picks) {
  const isNumeric = (field) => runs.every((run) => (field.value(run) ?? null) === null || typeof field.value(run) === "number");
  const box = (run) => {
    const node = el("input", {
      type: "checkbox", checked: picks.chosen.has(run.id), disabled: run.status === "unreadable", "data-key": `pick-${run.id}`,
      "aria-label": `select ${run.name} to compare`, on: { change: () => picks.toggle(run, node.checked) },
    });
    return node;
  };
  const own = fields.map((field) => ({
    key: field.key, title: field.title, number: field.kind !== "s" || isNumeric(field), plain: field.kind === "s", value: field.value, spread: field.value,
    cell: (run) => (field.kind === "s" ? cut(plainValue(field.value(run)), 40) : short(field.value(run), 4)),
    extra: el("button", { type: "button", class: "remove", "data-key": `remove-${field.key}`, "aria-label": `remove the column ${field.title}`, on: { click: () => picks.remove(field.key) } }, "×"),
  }));
  return [
    { key: "pick", title: "", head: el("span", { class: "unseen" }, "Select"), cell: box },
    {
      key: "name", title: "Run", value: (run) => run.name,
      cell: (run) => [
        el("a", { href: `#/run/${run.id}` }, cut(run.name, 60)),
        run.path === run.name || run.path === "." ? null : el("div", { class: "soft small", title: run.path }, cut(folderOf(run), 60)),
        run.message ? el("div", { class: "trouble small" }, cut(run.message, 200)) : null,
      ],
    },
    { key: "status", title: "Status", value: (run) => run.status, cell: (run) => statusBadge(run.status) },
    ...own,
    {
      key: "started", title: "Started", value: (run) => run.started, down: true,
      cell: (run) => el("span", { title: exactMoment(run.started) }, moment(run.started)),
    },
    { key: "step", title: "Steps", number: true, value: (run) => run.last_step, spread: (run) => run.last_step, down: true, cell: (run) => short(run.last_step) },
    { key: "time", title: "Time", number: true, value: (run) => run.seconds, down: true, cell: (run) => duration(run.seconds) },
    {
      key: "loss", title: "Last value", number: true, value: (run) => run.loss?.value, spread: (run) => run.loss?.value,
      cell: (run) => (run.loss ? el("span", { title: run.loss.name }, `${run.loss.name} ${short(run.loss.value)}`) : "–"),
    },
    { key: "layers", title: "Layers", value: (run) => Object.keys(run.readings ?? {}).join(" "), cell: readingChips },
    // Chosen columns need the room.
    ...(own.length > 1 ? [] : [{ key: "settings", title: "Settings", wide: true, value: settingsText, cell: (run) => el("span", { class: "soft small" }, settingsText(run)) }]),
  ];
}

// The row of a group: mean ± standard deviation of the numbers, and the only value where all runs have the same.
export function groupRow(columns, field, group, open, toggle) {
  const means = new Map();
  const cell = (column) => {
    if (column.key === "name") {
      const label = `${field.title} = ${group.value === null ? "–" : cut(plainValue(group.value), 40)}`;
      return [
        el("button", { type: "button", class: "group", "data-key": `group-${group.key}`, "aria-expanded": open ? "true" : "false", on: { click: toggle } }, el("span", { "aria-hidden": "true" }, open ? "▾ " : "▸ "), label),
        el("span", { class: "soft small" }, ` ${group.runs.length} ${group.runs.length === 1 ? "run" : "runs"}`),
      ];
    }
    const spread = column.spread ? spreadOf(group.runs.map(column.spread)) : null;
    if (spread) {
      means.set(column.key, spread.mean);
      if (column.plain && spread.low === spread.high) return plainValue(spread.low);
      return spread.deviation === null || spread.low === spread.high ? short(spread.mean, 4) : [short(spread.mean), el("span", { class: "soft" }, ` ± ${short(spread.deviation, 2)}`)];
    }
    const texts = column.spread || column.key === "status" ? [...new Set(group.runs.map((run) => plainValue(column.value(run))))] : [];
    return texts.length === 1 ? texts[0] : texts.length ? el("span", { class: "soft" }, `${texts.length} values`) : "";
  };
  const cells = columns.map((column) => [column, cell(column)]);
  return { means, node: () => el("tr", { class: "group-row" }, cells.map(([column, content]) => cellOf(column, content))) };
}
