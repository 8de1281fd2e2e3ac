// Charts by plotly, in the colors of the page.

import { logTicks } from "./axes.js";
import { accompany } from "./chart_text.js";
import { el } from "./dom.js";
import { cut, inert, short } from "./format.js";
import { isDark, onTheme } from "./theme.js";

// Palette of Okabe and Ito, as in featlearn.plots, for color-blind readers.
const PALETTE = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"];
const DEPTHS = ["#08306b", "#2171b5", "#2b9e8f", "#e0a100", "#c2410c"];
const DARK_DEPTHS = ["#9ecbff", "#4aa3df", "#2cc295", "#e9b23c", "#ff8a5c"];
const living = new Map();

export function color(place) {
  const own = PALETTE[place % PALETTE.length];
  if (!isDark()) return own;
  return { "#000000": "#E8E8E8", "#0072B2": "#4AA3DF", "#D55E00": "#F08A4B", "#009E73": "#2CC295" }[own] ?? own;
}

// The color of one of many curves, from the first to the last.
export function depthColor(place, count) {
  const stops = isDark() ? DARK_DEPTHS : DEPTHS;
  const at = (place / Math.max(count - 1, 1)) * (stops.length - 1);
  const low = Math.min(Math.floor(at), stops.length - 2);
  const part = (stop, index) => parseInt(stop.slice(1 + 2 * index, 3 + 2 * index), 16);
  const mixed = [0, 1, 2].map((index) => Math.round(part(stops[low], index) * (1 - at + low) + part(stops[low + 1], index) * (at - low)));
  return `rgb(${mixed.join(", ")})`;
}

export function ink() {
  const style = getComputedStyle(document.documentElement);
  const of = (name) => style.getPropertyValue(name).trim();
  return { ink: of("--ink"), soft: of("--soft"), line: of("--line"), paper: of("--paper"), card: of("--card") };
}

// Loaded with the first chart: the list of runs does not wait for four megabytes. An exported file contains it.
async function plotlyReady() {
  if (!window.Plotly && !document.getElementById("plotly")) document.head.append(el("script", { id: "plotly", src: "/plotly.min.js" }));
  for (let turn = 0; turn < 600 && !window.Plotly; turn += 1) await new Promise((go) => setTimeout(go, 25));
  if (!window.Plotly) throw new Error("plotly.min.js could not be loaded");
  return window.Plotly;
}

// Draws now, and again when the theme changes; `build` returns {data, layout}.
export async function chart(node, label, build) {
  node.classList.add("chart");
  node.setAttribute("role", "img");
  node.setAttribute("aria-label", label);
  living.set(node, build);
  const plotly = await plotlyReady();
  if (!node.isConnected || living.get(node) !== build) return;
  const { data, layout } = build();
  await plotly.react(node, data, dressed(layout), { responsive: true, displaylogo: false, displayModeBar: false });
  accompany(node, label);
  node.dataset.drawn = String(Number(node.dataset.drawn ?? 0) + 1);
}

export function forgetCharts() {
  for (const node of living.keys()) window.Plotly?.purge(node);
  living.clear();
}

onTheme(() => {
  for (const [node, build] of living) {
    if (node.isConnected) chart(node, node.getAttribute("aria-label"), () => build());
    else living.delete(node);
  }
});

function dressed(layout) {
  const own = ink();
  const axis = {
    gridcolor: own.line, zerolinecolor: own.line, linecolor: own.line, tickcolor: own.line, automargin: true,
    tickfont: { size: 11 }, title: { standoff: 6 },
  };
  const merged = {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", autosize: true,
    font: { family: "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif", size: 12, color: own.ink },
    margin: { l: 48, r: 12, t: 10, b: 40 }, hovermode: "closest",
    hoverlabel: { bgcolor: own.card, bordercolor: own.line, font: { color: own.ink } },
    legend: { orientation: "h", yanchor: "bottom", y: 1.01, x: 0, font: { size: 11 } },
    ...layout,
  };
  for (const key of Object.keys(merged)) if (/^[xy]axis/.test(key)) merged[key] = { ...axis, ...merged[key] };
  merged.xaxis ??= axis;
  merged.yaxis ??= axis;
  return merged;
}

// Colors from low to high: a diverging scale for signed values, otherwise a sequential one.
export function heatScale(signed) {
  const middle = isDark() ? "#1d2127" : "#ffffff";
  if (signed && isDark()) return [[0, "#7cc4f5"], [0.25, "#2b77ad"], [0.5, middle], [0.75, "#b8571a"], [1, "#ffb27a"]];
  if (signed) return [[0, "#08456f"], [0.25, "#5aa5d6"], [0.5, middle], [0.75, "#ee9a5f"], [1, "#8f3a00"]];
  if (isDark()) return [[0, middle], [0.35, "#1f5f8b"], [0.7, "#4aa3df"], [1, "#d8efff"]];
  return [[0, middle], [0.3, "#b9daf0"], [0.65, "#3b8dc4"], [1, "#063455"]];
}

// Heat map of a matrix: a diverging color scale if it has negative entries, otherwise a sequential one.
export function heatChart(node, label, matrix, names = null) {
  const signed = matrix.low < -0.005 * Math.max(Math.abs(matrix.high), 1e-300);
  const size = Math.max(Math.abs(matrix.low), Math.abs(matrix.high)) || 1;
  return chart(node, label, () => {
    const [rows, columns] = [matrix.values.length, matrix.values[0].length];
    const place = (index, block) => (block > 1 ? index * block : index);
    const labels = names && names.length === rows && rows === columns ? names.map((name) => inert(cut(name, node.clientWidth > 420 ? 22 : 12))) : null;
    const data = [{
      type: "heatmap", z: matrix.values, meta: "matrix",
      x: labels ?? Array.from({ length: columns }, (_, i) => place(i, matrix.block[1])),
      y: labels ?? Array.from({ length: rows }, (_, i) => place(i, matrix.block[0])),
      colorscale: heatScale(signed), zmin: signed ? -size : 0, zmax: size,
      hovertemplate: "row %{y}, column %{x}: %{z:.3g}<extra></extra>",
      colorbar: { thickness: 10, outlinewidth: 0, tickfont: { size: 10 }, len: 0.9, nticks: 5, exponentformat: "power" },
    }];
    const square = Math.abs(Math.log(rows / columns)) < 0.7;
    const layout = {
      margin: { l: 10, r: 6, t: 6, b: 10 },
      xaxis: { constrain: "domain", ticks: "", showgrid: false, zeroline: false, nticks: 6, tickangle: labels ? -50 : 0 },
      yaxis: {
        autorange: "reversed", constrain: "domain", ticks: "", showgrid: false, zeroline: false, nticks: 6,
        ...(square ? { scaleanchor: "x" } : {}),
      },
      uirevision: label,
    };
    if (labels) {
      layout.xaxis.nticks = layout.yaxis.nticks = rows;
      layout.xaxis.type = layout.yaxis.type = "category";
      layout.xaxis.tickfont = layout.yaxis.tickfont = { size: rows > 20 ? 8 : 10 };
      layout.xaxis.showticklabels = node.clientWidth > 420; // they equal those of the rows
    }
    return { data, layout };
  });
}

export function barChart(node, label, bars) {
  return chart(node, label, () => {
    const shown = [...bars].reverse();
    return {
      data: [{
        type: "bar", orientation: "h", meta: "value", x: shown.map((bar) => bar.value), y: shown.map((bar) => inert(cut(bar.label, 30))),
        marker: { color: color(0) }, hovertemplate: "%{y}: %{x:.3g}<extra></extra>",
        text: shown.map((bar) => short(bar.value, 2)), textposition: "outside", cliponaxis: false, textfont: { size: 10 },
      }],
      layout: {
        margin: { l: 10, r: 40, t: 6, b: 30 }, bargap: 0.25, height: Math.max(220, 24 * bars.length + 60),
        yaxis: { type: "category", showgrid: false }, xaxis: { rangemode: "tozero" },
      },
    };
  });
}

// Both spectra as step lines, the edges of the bulk as lines, spikes as markers.
export function spectrumChart(node, label, found) {
  return chart(node, label, () => {
    const own = ink();
    const { log, edges, initial, trained } = found.histogram;
    const outline = (shares) => ({
      x: edges, y: [...shares, shares.at(-1)], type: "scatter", mode: "lines", hovertemplate: "%{y:.3g} of all at %{x:.3g}",
    });
    const top = Math.max(...initial, ...trained) * 1.12;
    const data = [
      {
        ...outline(initial), name: `step ${found.initial_step}`, meta: `step ${found.initial_step}`, fill: "tozeroy", fillcolor: "rgba(128,128,128,0.22)",
        line: { color: own.soft, width: 1.2, shape: "hv" },
      },
      {
        ...outline(trained), name: `step ${found.step}`, meta: `step ${found.step}`, fill: "tozeroy", fillcolor: "rgba(0,114,178,0.25)",
        line: { color: color(0), width: 1.8, shape: "hv" },
      },
    ];
    if (found.spikes.length) {
      data.push({
        type: "scatter", mode: "markers", name: found.spikes.length === 1 ? "new spike" : "new spikes", x: found.spikes,
        y: found.spikes.map(() => top * 0.035), hovertemplate: "%{x:.4g}",
        marker: { symbol: "triangle-down", size: 11, color: color(1), line: { width: 1, color: own.paper } },
      });
    }
    const line = (value, colors, dash, name) => ({
      type: "scatter", mode: "lines", x: [value, value], y: [0, top], name, line: { color: colors, dash, width: 1.4 },
      hovertemplate: "%{x:.4g}",
    });
    if (found.initial_edge !== null) data.push(line(found.initial_edge, own.soft, "dot", "initial edge"));
    if (found.edge !== null) data.push(line(found.edge, color(2), "dash", "edge now"));
    return {
      data,
      layout: {
        xaxis: { title: { text: "eigenvalue", standoff: 4 }, ...(log ? logTicks(edges) : { type: "linear" }), exponentformat: "power" },
        yaxis: { title: { text: "share", standoff: 4 }, range: [0, top] },
      },
    };
  });
}
