// Charts of curves, and of means with bands.

import { constantRange, logTicks, stepAxis } from "./axes.js";
import { chart, color, depthColor } from "./charts.js";
import { el, fill } from "./dom.js";
import { cut, inert } from "./format.js";

const DASHES = ["solid", "dash", "dot", "dashdot"];
const COLORS = 7;
export const LABEL = 36; // characters in a legend
const MANY = 8; // for more curves, colors follow their order, and the legend is outside the chart

// Exponential moving average without a bias to the first values; a missing value stays one.
export function smoothed(values, weight) {
  let [sum, norm] = [0, 0];
  return values.map((value) => {
    if (value === null || !Number.isFinite(value)) return null;
    sum = weight * sum + (1 - weight) * value;
    norm = weight * norm + (1 - weight);
    return sum / norm;
  });
}

// Curves are {label, steps, values, x: places on another axis than the steps}. Options: log (of the steps), logValues,
// bounded, zero, along (title of the axis), smooth (0 to 1), range (shown places), marker (a place), zoomed(range), and
// key: an element for the legend of many curves.
export function curveChart(node, label, curves, options = {}) {
  const many = curves.length > MANY && Boolean(options.key);
  return chart(node, label, () => {
    if (options.key) fillKey(options.key, many ? curves : []);
    const smooth = options.smooth ?? 0;
    const data = [];
    curves.forEach((curve, place) => {
      const tint = many ? depthColor(place, curves.length) : color(place);
      const places = curve.x ?? (options.log ? curve.steps.map((step) => Math.max(step, 0.5)) : curve.steps);
      const trace = {
        type: "scatter", mode: many || curve.steps.length > 60 ? "lines" : "lines+markers", name: inert(curve.brief ?? cut(curve.label, LABEL)), meta: curve.label,
        x: places, y: smooth ? smoothed(curve.values, smooth) : curve.values, customdata: curve.steps, connectgaps: false, marker: { size: 4 },
        line: { color: tint, width: many ? 1.3 : 1.8, dash: many ? "solid" : DASHES[Math.floor(place / COLORS) % DASHES.length] },
        hovertemplate: "%{y:.4g} at step %{customdata}",
      };
      if (smooth) data.push({ ...trace, mode: "lines", y: curve.values, meta: `${curve.label} (not smoothed)`, opacity: 0.25, showlegend: false, hoverinfo: "skip", hovertemplate: undefined });
      data.push(smooth ? { ...trace, mode: "lines" } : trace);
    });
    const layout = { ...stepLayout(curves, options), showlegend: !many && (curves.length > 1 || Boolean(curves[0]?.named)) };
    layout.yaxis = { exponentformat: "power", fixedrange: true, rangemode: options.zero ? "tozero" : "normal", ...(options.logValues ? logTicks(curves.flatMap((curve) => curve.values)) : constantRange(curves.flatMap((curve) => curve.values))) };
    if (options.bounded && !options.logValues) layout.yaxis.range = boundedRange(curves);
    return { data, layout };
  }).then(() => listenZoom(node, options));
}

// Bands are {label, places, mean, low, high, counts}, of `bandOf`.
export function bandChart(node, label, bands, options = {}) {
  return chart(node, label, () => {
    const data = [];
    // A logarithmic axis has no place for a lower end that is not positive: the band ends below all means.
    const floor = bands.flatMap((band) => band.mean).filter((value) => value > 0).reduce((a, b) => Math.min(a, b), Infinity) / 3;
    bands.forEach((band, place) => {
      const tint = bands.length > COLORS ? depthColor(place, bands.length) : color(place);
      const places = options.log ? band.places.map((step) => Math.max(step, 0.5)) : band.places;
      const low = options.logValues ? band.low.map((value) => Math.max(value, floor)) : band.low;
      data.push({
        type: "scatter", mode: "lines", x: [...places, ...[...places].reverse()], y: [...band.high, ...low.reverse()], fill: "toself", fillcolor: tint,
        opacity: 0.18, line: { width: 0 }, hoverinfo: "skip", showlegend: false, legendgroup: String(place), meta: `${band.label} (band)`,
      });
      data.push({
        type: "scatter", mode: places.length > 60 ? "lines" : "lines+markers", x: places, y: band.mean, customdata: band.counts, name: inert(cut(band.label, LABEL)), meta: band.label,
        legendgroup: String(place), line: { color: tint, width: 2 }, marker: { size: 4 }, hovertemplate: "%{y:.4g}, mean of %{customdata}",
      });
    });
    const curves = bands.map((band) => ({ steps: band.places, x: options.axis === "step" ? undefined : band.places }));
    const layout = { ...stepLayout(curves, options), showlegend: true };
    layout.yaxis = { exponentformat: "power", fixedrange: true, ...(options.logValues ? logTicks(bands.flatMap((band) => [...band.mean, ...band.high])) : {}) };
    return { data, layout };
  }).then(() => listenZoom(node, options));
}

function stepLayout(curves, options) {
  const largest = Math.max(1, ...curves.map((curve) => curve.steps.at(-1) ?? 1));
  const other = curves.some((curve) => curve.x);
  const ticks = other ? {} : stepAxis(largest, options.log);
  const xaxis = { title: { text: options.along ?? "step", standoff: 4 }, type: options.log ? "log" : "linear", exponentformat: "power", ...ticks };
  if (options.range) xaxis.range = axisRange(options.range, options.log);
  else if (options.log && !other) xaxis.range = [Math.log10(0.45), Math.log10(largest * 1.1)];
  const shapes = Number.isFinite(options.marker) ? [{ type: "line", xref: "x", yref: "paper", x0: options.marker, x1: options.marker, y0: 0, y1: 1, line: { color: color(1), width: 1.5, dash: "dot" } }] : [];
  return { xaxis, shapes, uirevision: JSON.stringify([options.range ?? null, options.log, options.along]) };
}

export function axisRange(range, log) {
  return log ? range.map((place) => Math.log10(Math.max(place, 0.45))) : range;
}

const reactions = new WeakMap();

// Calls options.zoomed with the range that was dragged, or null for all.
export function listenZoom(node, options) {
  const known = reactions.has(node);
  reactions.set(node, options);
  if (known || !node.on) return;
  node.on("plotly_relayout", (change) => {
    const { zoomed, log } = reactions.get(node);
    const ends = [change["xaxis.range[0]"], change["xaxis.range[1]"]];
    if (!zoomed) return;
    if (change["xaxis.autorange"]) zoomed(null);
    else if (ends.every((end) => typeof end === "number")) zoomed(log ? ends.map((end) => 10 ** end) : ends);
  });
}

// The legend of many curves: their colors from the first to the last, and a list that can be opened.
function fillKey(place, curves) {
  if (!curves.length) return fill(place);
  const swatch = (index) => el("i", { class: "dot", style: `background: ${depthColor(index, curves.length)}` });
  const ramp = el("i", { class: "ramp", style: `background: linear-gradient(to right, ${[0, 1, 2, 3, 4].map((part) => depthColor(part, 5)).join(", ")})` });
  const open = place.querySelector("details")?.open ?? false;
  const focused = place.contains(document.activeElement);
  const summary = el("summary", {}, `${curves.length} curves: `, cut(curves[0].label, 48), " ", ramp, " ", cut(curves.at(-1).label, 48));
  fill(place, el("details", { open }, summary, el("div", { class: "key-list" }, curves.map((curve, index) => el("span", {}, swatch(index), cut(curve.label, 48))))));
  if (focused) summary.focus();
  return place;
}

function boundedRange(curves) {
  const least = Math.min(0, ...curves.flatMap((curve) => curve.values.filter((value) => value !== null)));
  return [Math.max(Math.min(least * 1.1, -0.03), -1.05), 1.05];
}
