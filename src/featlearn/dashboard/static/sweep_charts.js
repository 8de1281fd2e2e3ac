// Charts of many runs: a metric against a setting, and parallel coordinates.

import { constantRange, logTicks } from "./axes.js";
import { chart, color, depthColor, ink } from "./charts.js";
import { cut, inert, plainValue, short } from "./format.js";
import { groupRuns, spreadOf } from "./groups.js";

const SHADES = 10;

// One point per run, in the color of a setting, and the mean where several runs share a value.
export function scatterChart(node, label, runs, { x, y, color: tinted, logX, logY }) {
  return chart(node, label, () => {
    const usable = runs.filter((run) => typeof y.value(run) === "number" && x.value(run) !== null);
    const numeric = usable.every((run) => typeof x.value(run) === "number");
    const place = (run) => (numeric ? x.value(run) : inert(cut(plainValue(x.value(run)), 30)));
    const groups = tinted ? groupRuns(usable, tinted.value) : [{ value: null, runs: usable }];
    const data = groups.map((group, index) => ({
      type: "scatter", mode: "markers", x: group.runs.map(place), y: group.runs.map(y.value), name: tinted ? inert(cut(`${tinted.title} = ${plainValue(group.value)}`, 36)) : "runs",
      meta: tinted ? `${tinted.title} = ${plainValue(group.value)}` : "runs", marker: { size: 7, opacity: 0.7, color: groups.length > 7 ? depthColor(index, groups.length) : color(index) },
      text: group.runs.map((run) => inert(cut(run.name, 60))), hovertemplate: "%{text}: %{y:.4g}<extra></extra>",
    }));
    const means = groupRuns(usable, x.value).map((group) => [place(group.runs[0]), spreadOf(group.runs.map(y.value))]).filter(([, spread]) => spread && spread.count > 1);
    if (means.length && means.length < usable.length) {
      data.push({ type: "scatter", mode: "lines+markers", name: "mean", meta: "mean", x: means.map(([at]) => at), y: means.map(([, spread]) => spread.mean), line: { color: color(6), width: 1.2, dash: "dot" }, marker: { symbol: "line-ew-open", size: 14, color: color(6) }, hovertemplate: "mean %{y:.4g}<extra></extra>" });
    }
    return {
      data,
      layout: {
        showlegend: data.length > 1 && groups.length <= 12,
        xaxis: { title: { text: inert(cut(x.title, 60)), standoff: 4 }, exponentformat: "power", ...(numeric ? (logX ? logTicks(usable.map(x.value)) : { type: "linear" }) : { type: "category" }) },
        yaxis: { title: { text: inert(cut(y.title, 60)), standoff: 4 }, exponentformat: "power", ...(logY ? logTicks(usable.map(y.value)) : { type: "linear", ...constantRange(usable.map(y.value)) }) }, uirevision: `${label} ${logX} ${logY}`,
      },
    };
  });
}

// Places from 0 to 1 of the values on an axis, and its ticks. Numbers that span decades are on a logarithmic scale.
export function axisScale(values) {
  const numbers = values.filter((value) => typeof value === "number" && Number.isFinite(value));
  if (numbers.length && numbers.length === values.filter((value) => value !== null).length) {
    const [low, high] = [numbers.reduce((a, b) => Math.min(a, b)), numbers.reduce((a, b) => Math.max(a, b))];
    const log = low > 0 && high / low >= 30;
    const of = (value) => (log ? Math.log(value) : value);
    const place = (value) => (value === null || !Number.isFinite(value) ? null : high === low ? 0.5 : (of(value) - of(low)) / (of(high) - of(low)));
    const distinct = [...new Set(numbers)].sort((a, b) => a - b);
    const even = [0, 0.25, 0.5, 0.75, 1].map((part) => (log ? Math.exp(of(low) + part * (of(high) - of(low))) : low + part * (high - low)));
    return { place, ticks: (distinct.length <= 10 ? distinct : even).map((value) => [place(value), short(value)]) };
  }
  const texts = groupRuns(values.filter((value) => value !== null), (value) => value).map((group) => group.key);
  const order = new Map(texts.map((text, index) => [text, texts.length > 1 ? index / (texts.length - 1) : 0.5]));
  return { place: (value) => (value === null ? null : order.get(plainValue(value)) ?? null), ticks: texts.slice(0, 12).map((text) => [order.get(text), cut(text, 12)]) };
}

// One line per run over the axes of its settings and the metric, in the color of the metric.
export function parallelChart(node, label, runs, settings, metric) {
  return chart(node, label, () => {
    const fields = [...settings, metric];
    const usable = runs.filter((run) => typeof metric.value(run) === "number" && Number.isFinite(metric.value(run)));
    const scales = fields.map((field) => axisScale(usable.map((run) => field.value(run) ?? null)));
    const ranks = [...usable].sort((a, b) => metric.value(a) - metric.value(b));
    const data = Array.from({ length: SHADES }, (_, shade) => {
      const some = ranks.slice(Math.floor((shade * ranks.length) / SHADES), Math.floor(((shade + 1) * ranks.length) / SHADES));
      // Lines of one color are one trace, with a break after each.
      return {
        type: "scatter", mode: "lines", x: some.flatMap(() => [...fields.keys(), null]), y: some.flatMap((run) => [...fields.map((field, axis) => scales[axis].place(field.value(run) ?? null)), null]),
        line: { color: depthColor(shade, SHADES), width: 1 }, opacity: usable.length > 200 ? 0.35 : 0.7, hoverinfo: "skip", meta: some.length ? `${metric.title} from ${short(metric.value(some[0]))} to ${short(metric.value(some.at(-1)))}` : "no runs",
      };
    }).filter((trace) => trace.x.length);
    const room = Math.max(8, Math.floor((node.clientWidth || 600) / fields.length / 7));
    const { card } = ink();
    const ticks = scales.flatMap((scale, axis) => scale.ticks.map(([at, text]) => ({ x: axis, y: at, text: inert(text), showarrow: false, xanchor: axis === fields.length - 1 ? "right" : "left", xshift: axis === fields.length - 1 ? -4 : 4, font: { size: 10 }, bgcolor: card, borderpad: 1 })));
    const side = (axis) => (axis === 0 ? "left" : axis === fields.length - 1 ? "right" : "center");
    const titles = fields.map((field, axis) => ({ x: axis, y: -0.06, yanchor: "top", text: inert(cut(field.title, room)), showarrow: false, xanchor: side(axis), font: { size: 11 } }));
    const lines = fields.map((_, axis) => ({ type: "line", x0: axis, x1: axis, y0: 0, y1: 1, line: { width: 1, color: "#888" } }));
    return {
      data,
      layout: {
        showlegend: false, annotations: [...ticks, ...titles], shapes: lines, margin: { l: 20, r: 20, t: 10, b: 10 },
        xaxis: { range: [-0.1, fields.length - 0.9], showticklabels: false, ticks: "", showline: false, showgrid: false, zeroline: false, fixedrange: true },
        yaxis: { range: [-0.16, 1.04], showline: false, showticklabels: false, ticks: "", showgrid: false, zeroline: false, fixedrange: true },
      },
    };
  });
}
