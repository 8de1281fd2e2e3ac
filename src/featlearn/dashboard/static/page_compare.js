// Comparison of any number of runs: metrics of all of them, and the settings in which they differ.

import { openView } from "./address.js";
import { card, el, fill, note, tick } from "./dom.js";
import { settingNames, settingOf } from "./fields.js";
import { parseFilter } from "./filter.js";
import { cut, layerTitle, plainValue, titleOf } from "./format.js";
import { panelGrid } from "./panels.js";
import { listedRuns, readAll, readPart, searchText } from "./run_list.js";
import { get, getDifferences, getManyCurves, isFile } from "./source.js";

const MOST_READ = 20; // runs whose names of metrics are read
const MOST_COLUMNS = 60; // runs of the table of settings
const MOST_PICKS = 200;
const MOST_EXACT = 50; // runs that are drawn with the smallest and largest value per pixel
const AXES = ["step", "time", "epoch"];

export async function comparePage(main, alive, _parts, query) {
  const view = openView("compare", query);
  await readAll(alive);
  if (!alive()) return null;
  const readable = () => listedRuns().filter((run) => run.status !== "unreadable");
  const runs = new Map(readable().map((run) => [run.id, run]));
  if (!runs.size) {
    fill(main, el("h1", {}, "Compare runs"), note("There are no runs to compare yet."));
    return null;
  }
  const listed = view.text("ids").split(",").filter((id) => runs.has(id));
  let chosen = listed.length || view.has("ids") ? listed : [...runs.values()].filter((run) => run.kind !== "rfm").slice(0, 2).map((run) => run.id);
  const details = new Map();
  const learn = async () => {
    for (const id of chosen.slice(0, MOST_READ)) if (!details.has(id)) details.set(id, await get(`runs/${id}`));
  };
  await learn();
  if (!alive()) return null;
  const table = el("div");
  const picks = el("div", { class: "picks" });
  const place = el("section", { class: "compared" });
  const search = el("input", { type: "search", id: "picks", placeholder: "words, or lr<0.01", value: view.text("filter"), spellcheck: "false" });
  search.addEventListener("input", () => { view.replace({ filter: search.value }); drawPicks(); });

  const source = {
    // Metrics that all runs have come first: the page starts with one of them.
    names: () => [...metricsOf(chosen.map((id) => details.get(id)).filter(Boolean)).keys()],
    layersOf: (name) => [...(metricsOf(chosen.map((id) => details.get(id)).filter(Boolean)).get(name)?.layers.keys() ?? [])],
    axes: () => AXES.filter((axis) => [...details.values()].some((run) => run.axes?.includes(axis))),
    first: () => {
      const found = metricsOf(chosen.map((id) => details.get(id)).filter(Boolean));
      const ofRuns = [...found.keys()].filter((name) => chosen.every((id) => Object.hasOwn(runs.get(id).metrics ?? {}, name)));
      const ofLayers = [...found.entries()].filter(([, one]) => Math.max(...one.layers.values()) === one.asked).map(([name]) => name);
      // The metrics of layers are known of the first runs only.
      const shared = chosen.length > MOST_READ && ofRuns.length ? ofRuns : [...ofLayers, ...ofRuns];
      const names = shared.length ? shared : [...found.keys()];
      return names.length ? [["nfc", "loss", "score"].find((name) => names.includes(name)) ?? names[0]] : [];
    },
    title: (name) => `${titleOf(name)} of several runs`,
    probe: async (name, layer) => ({ curves: await getManyCurves(chosen.slice(0, 1), name, layer, { width: 200 }) }),
    load: async (name, layer, options) => {
      // Smallest and largest values of few parts would be zigzags: many runs are drawn with means.
      const mean = chosen.length > MOST_EXACT;
      const width = mean ? Math.max(60, 20000 / chosen.length) : options.width;
      const curves = await getManyCurves(chosen, name, layer, { ...options, width, mean }, () => alive());
      const labels = labelsOf(chosen.map((id) => runs.get(id)));
      const missing = chosen.length - new Set(curves.map((curve) => curve.id)).size;
      return {
        curves: curves.map((curve) => ({ ...curve, label: labels.get(curve.id), named: true, reduced: curve.reduced && !mean })),
        message: [
          mean && curves.some((curve) => curve.reduced) ? "Means of several steps." : "",
          missing ? `${missing} of the runs ${missing > 1 ? "do" : "does"} not have this metric${layer ? ` of ${layerTitle(layer)}` : ""}.` : "",
        ].join(" ").trim(),
      };
    },
  };
  const draw = async () => {
    if (!chosen.length || !source.names().length) fill(place, note(chosen.length ? "These runs have not logged any metrics yet." : "Select runs below."));
    else {
      const panels = await panelGrid(view, source, alive);
      if (!panels || !alive()) return;
      fill(place, panels.tools, panels.grid);
      panels.grid.classList.add("wide-panels");
      await panels.begin();
    }
    fill(table, await differences(chosen.map((id) => runs.get(id))));
  };
  const pick = async (id, on) => {
    chosen = on ? [...chosen, id] : chosen.filter((one) => one !== id);
    view.set({ ids: chosen.join(",") || "none" });
    await learn();
    await draw();
  };
  const drawPicks = () => {
    const all = readable();
    const matching = all.filter(parseFilter(view.text("filter"), all, searchText).matches);
    const shown = [...matching.filter((run) => chosen.includes(run.id)), ...matching.filter((run) => !chosen.includes(run.id))];
    const labels = labelsOf(all);
    fill(picks, shown.slice(0, MOST_PICKS).map((run) => tick(cut(labels.get(run.id), 60), chosen.includes(run.id), (on) => pick(run.id, on))), shown.length > MOST_PICKS ? note(`${shown.length - MOST_PICKS} more: filter them, or select them in the list of runs.`) : null);
  };
  fill(
    main, el("h1", {}, "Compare runs ", el("span", { class: "soft" }, chosen.length > 2 ? `${chosen.length} runs` : "")), place, card("Settings that differ", table),
    card("Runs", el("div", { class: "controls" }, el("span", { class: "control grow" }, el("label", { for: "picks" }, "Filter"), search)), picks),
  );
  drawPicks();
  await draw();
  return isFile ? null : { every: 3000, refresh: async () => {
    const before = JSON.stringify(chosen.map((id) => runs.get(id)));
    if (!(await readPart()) || !alive()) return;
    runs.clear(); // a run may have been removed
    for (const run of readable()) runs.set(run.id, run);
    chosen = chosen.filter((id) => runs.has(id));
    if (before !== JSON.stringify(chosen.map((id) => runs.get(id)))) await draw();
  } };
}

// Metrics of runs, with the number of runs that have each of their layers.
function metricsOf(all) {
  const found = new Map();
  const add = (name, layer) => {
    if (!found.has(name)) found.set(name, { layers: new Map(), asked: all.length });
    const { layers } = found.get(name);
    layers.set(layer, (layers.get(layer) ?? 0) + 1);
  };
  for (const run of all) {
    for (const name of run.quantities ?? []) add(name, "");
    for (const [layer, names] of Object.entries(run.layers ?? {})) for (const name of names) add(name, layer);
  }
  for (const one of found.values()) one.layers = new Map([...one.layers].sort((a, b) => b[1] - a[1]));
  return found;
}

export function labelsOf(runs) {
  const counts = new Map();
  for (const run of runs) counts.set(run.name, (counts.get(run.name) ?? 0) + 1);
  return new Map(runs.map((run) => [run.id, counts.get(run.name) > 1 ? `${run.name} (${run.path})` : run.name]));
}

async function differences(runs) {
  if (runs.length < 2) return note(`Select ${runs.length ? "a second run" : "two runs"} to compare settings.`);
  const some = runs.slice(0, MOST_COLUMNS);
  const rows = (await getDifferences(some.map((run) => run.id))) ?? settingNames(some).map((setting) => ({ setting, values: Object.fromEntries(some.map((run) => [run.id, settingOf(run, setting)])) }));
  const differing = rows.filter(({ values }) => new Set(some.map((run) => JSON.stringify(values[run.id] ?? null))).size > 1);
  if (!differing.length) return note("The settings of these runs are equal.");
  const labels = labelsOf(some);
  return [
    el("div", { class: "wide" }, el(
      "table", {},
      el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "Setting"), some.map((run) => el("th", { scope: "col" }, el("a", { href: `#/run/${run.id}` }, cut(labels.get(run.id), 40)))))),
      el("tbody", {}, differing.map((row) => el("tr", {}, el("th", { scope: "row" }, row.setting), some.map((run) => el("td", {}, cut(plainValue(row.values[run.id]), 60)))))),
    )),
    runs.length > some.length ? note(`The first ${some.length} of ${runs.length} runs.`) : null,
  ];
}
