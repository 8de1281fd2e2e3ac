// Metrics over the steps, of the training and of the layers.

import { curveChart } from "./charts.js";
import { choice, el, fill, note, tick } from "./dom.js";
import { familyOptions, layerTitle, looksLogarithmic, titleOf } from "./format.js";
import { getSeries } from "./source.js";

const BOUNDED = /nfc|^fact$|^bfact$|^enfa$|^benfa$|centered_ratio|^alignment$/;
const LOGARITHMIC = /loss|relgrad|\.top$/;
const WANTED = [["loss", "train_loss", "score"], ["nfc"], ["centered_nfc", "centered_ratio", "weight_change"], ["fact", "weight_change", "centered_ratio"], ["ck.kta"], ["w.effective_rank", "w.alpha"]];
const curveState = { run: null, chosen: [], logSteps: null, logValues: {} };

export function isBounded(name) {
  return BOUNDED.test(name);
}

export function isLogarithmic(name) {
  return LOGARITHMIC.test(name);
}

export function allNames(run) {
  return [...new Set([...(run.quantities ?? []), ...Object.values(run.layers ?? {}).flat()])];
}

function firstChoices(names) {
  const chosen = [];
  for (const some of WANTED) {
    const found = some.find((name) => names.includes(name) && !chosen.includes(name));
    if (found) chosen.push(found);
  }
  for (const name of names) if (chosen.length < 4 && !chosen.includes(name) && !name.startsWith("monitor.")) chosen.push(name);
  return chosen;
}

export async function curvesTab(body, run, alive) {
  let names = allNames(run);
  if (!names.length) {
    fill(body, note(run.status === "running" ? "No metrics have been logged yet. Curves appear with the first step." : "This run has not logged any metrics."));
    return async (now) => { if (allNames(now).length && alive()) await curvesTab(body, now, alive); };
  }
  if (curveState.run !== run.id) Object.assign(curveState, { run: run.id, chosen: firstChoices(names), logSteps: null, logValues: {} });
  curveState.chosen = curveState.chosen.filter((name) => names.includes(name));
  const panels = curveState.chosen.map((_, place) => panel(run, () => names, place, alive));
  if (curveState.logSteps === null) {
    const probe = Object.keys(run.layers ?? {}).length ? curveState.chosen.find((name) => !(run.quantities ?? []).includes(name)) : undefined;
    const found = await getSeries(run.id, probe ?? curveState.chosen[0], { width: 200 });
    if (!alive()) return null;
    curveState.logSteps = looksLogarithmic(found.curves[0]?.steps ?? []);
  }
  const all = () => Promise.all(panels.map((one) => one.draw()));
  fill(
    body, el("div", { class: "controls" }, tick("logarithmic steps", curveState.logSteps, (on) => { curveState.logSteps = on; all(); })),
    el("div", { class: "grid" }, panels.map((one) => one.node)),
  );
  await all();
  return async (now) => {
    names = allNames(now);
    await all();
  };
}

function panel(run, names, place, alive) {
  const figure = el("div", { class: "figure" });
  const words = el("p", { class: "soft small" });
  const key = el("div", { class: "key scroll" });
  const head = el("div", { class: "controls" });
  const node = el("section", { class: "card" }, head, figure, key, words);
  const name = () => curveState.chosen[place];
  const logs = () => curveState.logValues[name()] ?? isLogarithmic(name());
  const redraw = () => draw().catch((error) => { words.textContent = error.message; });
  const top = () =>
    fill(
      head,
      choice("Metric", familyOptions(names()), name(), (value) => { curveState.chosen[place] = value; zoom = {}; top(); redraw(); }),
      tick("log", logs(), (on) => { curveState.logValues[name()] = on; redraw(); }),
    );
  let shown = null;
  let zoom = {}; // kept while the run continues
  async function draw() {
    const asked = name();
    const width = figure.clientWidth || 600;
    const found = await getSeries(run.id, asked, { width, log: curveState.logSteps, ...(curveState.logSteps ? {} : zoom) });
    if (!alive() || asked !== name()) return;
    await picture(found);
    listen();
  }
  async function picture(found) {
    shown = found;
    const curves = found.curves.map((curve) => ({ ...curve, label: layerTitle(curve.layer), named: curve.layer !== null }));
    const reduced = found.curves.some((curve) => curve.reduced);
    words.textContent = [
      reduced ? `Smallest and largest value per pixel${curveState.logSteps ? "" : "; zoom in for all values"}.` : "",
      found.left_out ? `${found.left_out} more layers are not shown.` : "",
    ].join(" ").trim();
    await curveChart(figure, `${titleOf(name())} over the steps`, curves, { logSteps: curveState.logSteps, logValues: logs(), key, bounded: isBounded(name()), zero: /kta$|rank$|spikes$/.test(name()) });
  }
  function listen() {
    if (figure.dataset.listens || !figure.on) return;
    figure.dataset.listens = "yes";
    // Values that are not shown are fetched when the user zooms in.
    figure.on("plotly_relayout", async (change) => {
      if (curveState.logSteps || !alive() || !shown) return;
      const [from, to] = [change["xaxis.range[0]"], change["xaxis.range[1]"]];
      if (from !== undefined && shown.curves.some((curve) => curve.reduced)) {
        const found = await getSeries(run.id, name(), { width: figure.clientWidth, from, to });
        if (!alive() || !found.curves.length) return;
        zoom = { from, to };
        await picture(found);
      } else if (change["xaxis.autorange"]) {
        zoom = {};
        await redraw();
      }
    });
  }
  top();
  return { node, draw };
}
