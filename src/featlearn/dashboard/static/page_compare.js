// Comparison of runs: one metric of all, and the settings in which they differ.

import { curveChart } from "./charts.js";
import { card, choice, el, fill, note, tick } from "./dom.js";
import { cut, familyOptions, layerTitle, looksLogarithmic, plainValue, titleOf } from "./format.js";
import { get, getComparison } from "./source.js";
import { isBounded, isLogarithmic } from "./tab_curves.js";

const MOST = 12;
const compareState = { name: null, layer: null, logSteps: null, logValues: null };

export async function comparePage(main, alive, _parts, query) {
  const list = await get("runs");
  const readable = list.runs.filter((run) => run.status !== "unreadable");
  let chosen = (query.get("ids") ?? "").split(",").filter((id) => readable.some((run) => run.id === id)).slice(0, MOST);
  if (!chosen.length) chosen = readable.filter((run) => run.kind !== "rfm").slice(0, 2).map((run) => run.id);
  const details = new Map();
  const learn = async () => {
    for (const id of chosen) if (!details.has(id)) details.set(id, await get(`runs/${id}`));
  };
  await learn();
  if (!alive()) return null;
  const figure = el("div", { class: "figure tall" });
  const words = el("p", { class: "soft small", role: "status" });
  const head = el("div", { class: "controls" });
  const table = el("div");

  const pairs = () => {
    const found = new Map(); // quantity -> layers
    for (const id of chosen) {
      const run = details.get(id);
      for (const name of run?.quantities ?? []) found.set(name, (found.get(name) ?? new Set()).add(""));
      for (const [layer, names] of Object.entries(run?.layers ?? {})) for (const name of names) found.set(name, (found.get(name) ?? new Set()).add(layer));
    }
    return found;
  };
  const draw = async () => {
    const found = pairs();
    if (!chosen.length || !found.size) {
      fill(head);
      fill(table);
      words.textContent = "";
      fill(figure, note(chosen.length ? "These runs have not logged any metrics yet." : "Select runs below."));
      return;
    }
    if (!found.has(compareState.name)) compareState.name = ["nfc", "loss", "score"].find((name) => found.has(name)) ?? [...found.keys()][0];
    const layers = [...found.get(compareState.name)];
    if (!layers.includes(compareState.layer)) [compareState.layer] = layers;
    const data = await getComparison(chosen, compareState.name, compareState.layer);
    if (!alive()) return;
    compareState.logSteps ??= looksLogarithmic(data.curves[0]?.steps ?? []);
    const logs = compareState.logValues ?? isLogarithmic(compareState.name);
    const again = () => draw().catch((error) => { words.textContent = error.message; });
    fill(
      head,
      choice("Metric", familyOptions([...found.keys()]), compareState.name, (value) => { compareState.name = value; compareState.logValues = null; again(); }),
      layers.length > 1 || layers[0] ? choice("Layer", layers.map((one) => [one, layerTitle(one)]), compareState.layer, (value) => { compareState.layer = value; again(); }) : null,
      tick("logarithmic steps", compareState.logSteps, (on) => { compareState.logSteps = on; again(); }), tick("log", logs, (on) => { compareState.logValues = on; again(); }),
    );
    const labels = labelsOf(data.runs);
    const missing = chosen.length - new Set(data.curves.map((curve) => curve.id)).size;
    words.textContent = missing ? `${missing} of the runs ${missing > 1 ? "do" : "does"} not have this metric.` : "";
    await curveChart(figure, `${titleOf(compareState.name)} of several runs`, data.curves.map((curve) => ({ ...curve, label: labels.get(curve.id), named: true })), {
      logSteps: compareState.logSteps, logValues: logs, bounded: isBounded(compareState.name),
    });
    fill(table, settingsTable(data, labels));
  };
  const picks = readable.map((run) => tick(cut(run.name, 40), chosen.includes(run.id), async (on) => {
    chosen = on ? [...chosen, run.id].slice(-MOST) : chosen.filter((id) => id !== run.id);
    history.replaceState(null, "", `#/compare?ids=${chosen.join(",")}`);
    await learn();
    await draw();
  }));
  fill(
    main, el("h1", {}, "Compare runs"),
    readable.length ? [el("section", { class: "card" }, head, figure, words), card("Settings that differ", table), card("Runs", el("div", { class: "picks" }, picks))] : note("There are no runs to compare yet."),
  );
  if (readable.length) await draw();
  return null;
}

function labelsOf(runs) {
  const counts = new Map();
  for (const run of runs) counts.set(run.name, (counts.get(run.name) ?? 0) + 1);
  return new Map(runs.map((run) => [run.id, counts.get(run.name) > 1 ? `${run.name} (${run.path})` : run.name]));
}

function settingsTable(data, labels) {
  const ids = data.runs.filter((run) => run.status !== "unreadable").map((run) => run.id);
  if (!data.settings.length) return note(ids.length > 1 ? "The settings of these runs are equal." : "Select a second run.");
  return el("div", { class: "wide" }, el(
    "table", {},
    el("thead", {}, el("tr", {}, el("th", {}, "Setting"), ids.map((id) => el("th", {}, cut(labels.get(id), 40))))),
    el("tbody", {}, data.settings.map((row) => el("tr", {}, el("th", { scope: "row" }, row.setting), ids.map((id) => el("td", {}, cut(plainValue(row.values[id]), 60)))))),
  ));
}
