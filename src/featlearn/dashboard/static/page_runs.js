// The list of runs.

import { card, el, fill, note } from "./dom.js";
import { cut, duration, exactMoment, moment, plainValue, short } from "./format.js";
import { get, isFile } from "./source.js";
import { chip } from "./strips.js";
import { replaceTable, sortable } from "./tables.js";

const listState = { sort: "started", down: true, search: "", chosen: new Set() };

export function statusBadge(status) {
  return el("span", { class: `status s-${/^[a-z]+$/.test(status) ? status : "unknown"}` }, status);
}

function settingsText(run) {
  const pairs = Object.entries(run.settings ?? {}).filter(([name]) => !["features", "kind"].includes(name));
  return cut(pairs.slice(0, 6).map(([name, value]) => `${name} ${cut(plainValue(value), 24)}`).join(", "), 90);
}

function readingChips(run) {
  const counts = new Map(Object.entries(run.readings ?? {}));
  const chips = [...counts].map(([word, count]) => el("span", { class: "chip-count" }, count > 1 ? `${count} × ` : "", chip(word)));
  return chips.length ? el("span", { class: "chips" }, chips) : run.kind === "rfm" ? "feature machine" : "–";
}

function columnsOf(redraw) {
  return [
    { key: "pick", title: "", cell: (run) => picker(run, redraw) },
    {
      key: "name", title: "Run", value: (run) => run.name,
      cell: (run) => [
        el("a", { href: `#/run/${run.id}` }, cut(run.name, 60)),
        run.path === run.name || run.path === "." ? null : el("div", { class: "soft small" }, cut(run.path, 60)),
        run.message ? el("div", { class: "trouble small" }, cut(run.message, 200)) : null,
      ],
    },
    { key: "status", title: "Status", value: (run) => run.status, cell: (run) => statusBadge(run.status) },
    {
      key: "started", title: "Started", value: (run) => run.started, down: true,
      cell: (run) => el("span", { title: exactMoment(run.started) }, moment(run.started)),
    },
    { key: "step", title: "Steps", number: true, value: (run) => run.last_step, down: true, cell: (run) => short(run.last_step) },
    { key: "time", title: "Time", number: true, value: (run) => run.seconds, down: true, cell: (run) => duration(run.seconds) },
    {
      key: "loss", title: "Last value", number: true, value: (run) => run.loss?.value,
      cell: (run) => (run.loss ? el("span", { title: run.loss.name }, `${run.loss.name} ${short(run.loss.value)}`) : "–"),
    },
    { key: "layers", title: "Layers", value: (run) => Object.keys(run.readings ?? {}).join(" "), cell: readingChips },
    { key: "settings", title: "Settings", wide: true, value: settingsText, cell: (run) => el("span", { class: "soft small" }, settingsText(run)) },
  ];
}

function picker(run, redraw) {
  const box = el("input", {
    type: "checkbox", checked: listState.chosen.has(run.id), disabled: run.status === "unreadable", "data-key": `pick-${run.id}`,
    "aria-label": `select ${run.name} to compare`,
    on: { change: () => { listState.chosen[box.checked ? "add" : "delete"](run.id); redraw(); } },
  });
  return box;
}

export async function runsPage(main, alive) {
  let found = await get("runs");
  if (!alive()) return;
  if (!found.runs.length) {
    fill(main, el("h1", {}, "No runs yet"), emptyList(found));
  }
  const place = el("div");
  const tally = el("span", { class: "soft", role: "status" });
  const compare = el("a", { class: "button", href: "#/compare" }, "Compare");
  const search = el("input", { type: "search", id: "search", placeholder: "name, folder, setting or status", value: listState.search });
  search.addEventListener("input", () => { listState.search = search.value; draw(); });
  const draw = () => {
    const words = listState.search.toLowerCase().split(/\s+/).filter(Boolean);
    const text = (run) => [run.name, run.path, run.status, run.kind ?? "", settingsText(run), ...Object.keys(run.readings ?? {})].join(" ").toLowerCase();
    const shown = found.runs.filter((run) => words.every((word) => text(run).includes(word)));
    const running = found.runs.filter((run) => run.status === "running").length;
    tally.textContent = `${shown.length === found.runs.length ? found.runs.length : `${shown.length} of ${found.runs.length}`} ${found.runs.length === 1 ? "run" : "runs"}${running ? `, ${running} running` : ""}`;
    for (const id of listState.chosen) if (!found.runs.some((run) => run.id === id)) listState.chosen.delete(id);
    compare.textContent = listState.chosen.size ? `Compare ${listState.chosen.size} selected` : "Select runs to compare";
    compare.classList.toggle("quiet", !listState.chosen.size);
    compare.href = listState.chosen.size ? `#/compare?ids=${[...listState.chosen].join(",")}` : "#/compare";
    const none = note(`No run matches “${listState.search}”.`);
    replaceTable(place, shown.length ? sortable(columnsOf(draw), shown, listState, draw) : none);
  };
  const show = () => {
    fill(
      main, el("h1", {}, "Runs ", el("span", { class: "soft" }, `in ${found.folder}`)),
      el("div", { class: "controls" }, el("span", { class: "control grow" }, el("label", { for: "search" }, "Search"), search), tally, compare),
      place,
    );
    draw();
  };
  if (found.runs.length) show();
  return isFile ? null : {
    every: 3000,
    async refresh() {
      const next = await get("runs");
      if (!alive() || JSON.stringify(next) === JSON.stringify(found)) return;
      const first = !found.runs.length;
      found = next;
      if (first) show();
      else draw();
    },
  };
}

function emptyList(found) {
  return card(
    null, note(`The folder “${found.folder}” has no runs. Add two lines to a training loop, and its run is shown here live:`, ""),
    el("pre", {}, 'monitor = featlearn.Monitor(model, (X, y), run="runs/first")\nfor step in range(1000):\n    ...\n    monitor.step(step, loss=loss)'),
    note("Or create one: featlearn demo --out demo; featlearn dashboard demo"),
  );
}
