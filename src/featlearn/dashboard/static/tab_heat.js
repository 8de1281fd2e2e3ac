// One metric of all layers over the steps, as a heat map of layers and steps.

import { powerTicks, stepAxis } from "./axes.js";
import { chart, heatScale, ink } from "./charts.js";
import { axisRange, listenZoom } from "./curve_chart.js";
import { choice, el, fill, note, refill, tick } from "./dom.js";
import { cut, familyOptions, inert, looksLogarithmic, titleOf } from "./format.js";
import { inModelOrder, layerLabel } from "./layer_names.js";
import { isLogarithmic, rangeInputs, shownRange, tidyRange } from "./panels.js";
import { getSeries } from "./source.js";
import { layerFilter } from "./tab_curves.js";

const ROW = 18; // pixels of a layer

export async function heatTab(body, first, alive, view, segment) {
  let run = first;
  const names = () => [...new Set(Object.values(run.layers ?? {}).flat())];
  if (!names().length) {
    fill(body, note("No metrics of layers have been logged."));
    return async (now) => { if (Object.keys(now.layers ?? {}).length && alive()) await heatTab(body, now, alive, view, segment); };
  }
  const figure = el("div", { class: "figure map" });
  const words = el("p", { class: "soft small", role: "status" });
  const name = () => view.one("metric", names(), ["nfc", "weight_change", "signal.gradient_norm"].find((one) => names().includes(one)) ?? names()[0]);
  const logColors = () => view.flag("logcolor", isLogarithmic(name()));
  let guess = false; // whether the steps are spaced like powers
  const logSteps = () => view.flag("logx", guess);
  const head = el("div", { class: "controls" });
  let turn = 0;
  const draw = async () => {
    turn += 1;
    const mine = turn;
    try {
      const found = await getSeries(run.id, name(), { width: 300, mean: true, layers: view.text("layers"), segment });
      if (!alive() || mine !== turn) return;
      const curves = inModelOrder(run, found.curves.filter((curve) => curve.layer !== null));
      words.textContent = [
        curves.length ? "" : "No layer matches.", curves.some((curve) => curve.reduced) ? "Each cell is the mean of several steps." : "",
        hasHoles(curves) ? "Gray cells have no value." : "",
        found.left_out ? `${found.left_out} more layers are not shown: select some by a pattern.` : "",
      ].join(" ").trim();
      if (curves.length && looksLogarithmic(curves[0].steps) !== guess) {
        guess = !guess;
        top();
      }
      if (curves.length) await layerMap(figure, `${titleOf(name())} by layer and step`, run, curves, { logColors: logColors(), logSteps: logSteps(), range: shownRange(view), zoomed });
    } catch (error) {
      if (alive()) words.textContent = error.message;
    }
  };
  const zoomed = (ends) => { view.replace(tidyRange(ends)); top(); draw(); };
  const top = () => refill(
    head, choice("Metric", familyOptions(names()), name(), (one) => { view.set({ metric: one, logcolor: null }); top(); draw(); }), layerFilter(view, draw),
    tick("logarithmic colors", logColors(), (on) => { view.set({ logcolor: on ? "1" : "0" }); draw(); }),
    tick("logarithmic steps", logSteps(), (on) => { view.set({ logx: on ? "1" : "0" }); draw(); }), rangeInputs(shownRange(view), zoomed),
  );
  top();
  fill(body, head, el("section", { class: "card" }, figure, words));
  await draw();
  return async (now) => {
    run = now;
    await draw();
  };
}

// Cells reach half a gap beyond the first and the last step, which between few steps would be far below 0.
function rangeOfCells(steps, range, log) {
  if (range) return { range: axisRange(range, log) };
  if (log || steps.length < 2) return {};
  const [first, last] = [steps[0], steps.at(-1)];
  const most = 0.03 * (last - first);
  return { range: [first - Math.min((steps[1] - first) / 2, most), last + Math.min((last - steps.at(-2)) / 2, most)] };
}

function hasHoles(curves) {
  const steps = new Set(curves.flatMap((curve) => curve.steps));
  return curves.some((curve) => curve.steps.length < steps.size || curve.values.includes(null));
}

function layerMap(node, label, run, curves, { logColors, logSteps, range, zoomed }) {
  node.style.height = `${Math.max(180, curves.length * ROW + 70)}px`;
  return chart(node, label, () => {
    const steps = [...new Set(curves.flatMap((curve) => curve.steps))].sort((a, b) => a - b);
    const place = new Map(steps.map((step, index) => [step, index]));
    const rows = curves.map((curve) => {
      const row = new Array(steps.length).fill(null);
      curve.steps.forEach((step, index) => { row[place.get(step)] = curve.values[index]; });
      return row;
    });
    const shown = logColors ? rows.map((row) => row.map((value) => (value > 0 ? Math.log10(value) : null))) : rows;
    const numbers = shown.flat().filter((value) => value !== null && Number.isFinite(value));
    const [low, high] = numbers.length ? [numbers.reduce((a, b) => Math.min(a, b)), numbers.reduce((a, b) => Math.max(a, b))] : [0, 1];
    const signed = !logColors && low < -0.005 * Math.max(Math.abs(high), 1e-300);
    const size = Math.max(Math.abs(low), Math.abs(high)) || 1;
    const labels = curves.map((curve) => layerLabel(run, curve.layer, node.clientWidth < 500 ? 14 : 56));
    const data = [{
      type: "heatmap", z: shown, x: logSteps ? steps.map((step) => Math.max(step, 0.5)) : steps, y: curves.map((_, index) => index),
      text: rows.map((row, index) => row.map((value, column) => `${inert(cut(curves[index].layer, 60))}, step ${steps[column]}: ${value === null ? "no value" : value.toPrecision(4)}`)),
      hovertemplate: "%{text}<extra></extra>", colorscale: heatScale(signed), zmin: signed ? -size : low, zmax: signed ? size : high === low ? low + 1 : high, meta: label,
      colorbar: { thickness: 10, outlinewidth: 0, tickfont: { size: 10 }, nticks: 5, ...(logColors ? powerTicks(low, high) : {}), exponentformat: "power" },
    }];
    // Names of the rows instead of their numbers, in downloads too.
    const layout = {
      margin: { l: 10, r: 6, t: 6, b: 40 },
      xaxis: { title: { text: "step", standoff: 4 }, type: logSteps ? "log" : "linear", ...stepAxis(steps.at(-1) ?? 1, logSteps), ...rangeOfCells(steps, range, logSteps), showgrid: false, zeroline: false },
      yaxis: { autorange: "reversed", tickmode: "array", tickvals: curves.map((_, index) => index), ticktext: labels.map(inert), tickfont: { size: 10 }, showgrid: false, zeroline: false, fixedrange: true },
      plot_bgcolor: ink().line, uirevision: JSON.stringify([label, range, logSteps]), // cells without a value are gray
    };
    return { data, layout };
  }).then(() => listenZoom(node, { zoomed, log: logSteps }));
}
