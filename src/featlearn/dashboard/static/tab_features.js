// Recursive feature machine: its feature matrix, importances and iterations.

import { barChart, heatChart } from "./charts.js";
import { curveChart } from "./curve_chart.js";
import { card, el, fill, note, numberRow, slider } from "./dom.js";
import { short, titleOf } from "./format.js";
import { getMatrix, getSeries } from "./source.js";

const MOST_BARS = 25;

const changes = ([, curves]) => new Set(curves.flatMap((curve) => curve.values)).size > 1;

export async function featuresTab(body, run, alive) {
  let steps = run.matrix_steps ?? [];
  let place = steps.length - 1;
  const heat = el("div", { class: "figure square tall" });
  const words = el("p", { class: "soft small" });
  const bars = el("div", { class: "figure bars" });
  const history = el("div", { class: "grid three" });
  const constants = el("div");
  const task = run.settings?.task ? `${run.settings.task} of ${run.settings.target ?? "the target"} from ${run.features.length} features` : `${run.features.length} features`;

  const drawMatrix = async () => {
    if (place < 0) {
      words.textContent = "No feature matrix has been stored yet.";
      return;
    }
    const step = steps[place];
    const found = await getMatrix(run.id, step, "feature_matrix");
    if (!alive() || step !== steps[place]) return;
    const size = `${found.shape[0]} × ${found.shape[1]}`;
    words.textContent = found.reduced ? `${size}, shown as means of blocks of ${found.block[0]} × ${found.block[1]}.` : `Diagonal entries are importances of features; other entries show pairs that act together.`;
    await heatChart(heat, `Feature matrix at iteration ${step}`, found, run.features);
    heat.dataset.step = String(step);
  };
  const drawBars = async () => {
    const found = await getSeries(run.id, "importance", { width: 4000 }).catch(() => ({ curves: [] }));
    const all = found.curves.map((curve) => ({ label: curve.layer ?? "", value: curve.values.at(-1) ?? 0 })).sort((a, b) => b.value - a.value);
    if (!alive()) return;
    if (!all.length) fill(bars, note("Importances appear at the end of the fit."));
    else await barChart(bars, "Importances of the features", all.slice(0, MOST_BARS));
  };
  const drawHistory = async (now) => {
    const names = (now.quantities ?? []).filter((name) => !name.startsWith("monitor."));
    const found = await Promise.all(names.map((name) => getSeries(run.id, name, { layer: "", width: 400 })));
    if (!alive()) return;
    const all = names.map((name, index) => [name, found[index].curves, el("div", { class: "figure small" })]);
    // A metric that is constant over the iterations is shown as a number.
    const [moved, same] = [all.filter(changes), all.filter((one) => !changes(one))];
    const last = (curves) => short(curves[0]?.values.at(-1));
    fill(history, moved.map(([name, curves, figure]) => (
      el("section", { class: "card" }, el("h3", {}, titleOf(name), " ", el("span", { class: "soft" }, last(curves))), figure)
    )));
    fill(constants, same.length ? numberRow(same.map(([name, curves]) => [titleOf(name), last(curves)])) : null);
    for (const [name, curves, figure] of moved) {
      await curveChart(figure, `${name} over the iterations`, curves.map((curve) => ({ ...curve, label: name })), { along: "iteration" });
    }
  };
  const steering = slider("Iteration", steps.length, Math.max(place, 0), (at) => String(steps[at] ?? "–"), (at) => { place = at; drawMatrix(); });
  fill(
    body, note(task, "lead"),
    el("div", { class: "grid" }, card("Feature matrix", el("div", { class: "controls" }, steering), heat, words), card("Feature importances", bars)),
    card("Over the iterations", history, constants),
  );
  await Promise.all([drawMatrix(), drawBars()]);
  await drawHistory(run);
  return async (now) => {
    const atEnd = place === steps.length - 1;
    steps = now.matrix_steps;
    if (atEnd) place = steps.length - 1;
    steering.adjust(steps.length, Math.max(place, 0));
    await Promise.all([drawMatrix(), drawBars()]);
    await drawHistory(now);
  };
}
