// What accompanies each chart: a text for screen readers, and downloads as CSV, PNG and SVG.

import { el, fill, freshId } from "./dom.js";
import { short } from "./format.js";

const MOST_TOLD = 20;

// Traces have their plain name as `meta`, since `name` is escaped for plotly.
function plainName(trace, place) {
  return String(trace.meta ?? trace.name ?? `curve ${place + 1}`);
}

export function accompany(node, label) {
  let place = node.nextElementSibling;
  if (!place?.classList.contains("chart-tools")) {
    const words = el("p", { class: "unseen", id: freshId("chart-text") });
    place = el("div", { class: "chart-tools" }, words, ["CSV", "PNG", "SVG"].map((kind) => el("button", { type: "button", on: { click: () => download(node, kind) } }, kind)));
    node.after(place);
    node.setAttribute("aria-describedby", words.id);
  }
  place.querySelectorAll("button").forEach((button) => button.setAttribute("aria-label", `download ${button.textContent}: ${label}`));
  fill(place.firstElementChild, describe(node.data));
}

function describe(traces) {
  const parts = traces.slice(0, MOST_TOLD).map((trace, place) => {
    if (trace.type === "heatmap") {
      const numbers = trace.z.flat().filter((value) => value !== null && Number.isFinite(value));
      return numbers.length ? `${trace.z.length} rows and ${trace.z[0].length} columns, values from ${short(least(numbers))} to ${short(most(numbers))}` : "no values";
    }
    const values = Array.from(trace.orientation === "h" ? trace.x : trace.y ?? []);
    const numbers = values.filter((value) => typeof value === "number" && Number.isFinite(value));
    if (!numbers.length) return `${plainName(trace, place)}: no values`;
    return `${plainName(trace, place)}: ${numbers.length} values from ${short(least(numbers))} to ${short(most(numbers))}, the last one ${short(numbers.at(-1))}`;
  });
  const rest = traces.length - parts.length;
  return `${parts.join("; ")}${rest > 0 ? `; and ${rest} more` : ""}.`;
}

const least = (numbers) => numbers.reduce((a, b) => Math.min(a, b));
const most = (numbers) => numbers.reduce((a, b) => Math.max(a, b));

async function download(node, kind) {
  const name = (node.getAttribute("aria-label") ?? "chart").toLowerCase().replace(/[^a-z0-9]+/g, "-").replace(/^-|-$/g, "").slice(0, 60) || "chart";
  if (kind === "CSV") {
    const address = URL.createObjectURL(new Blob([tableOfChart(node.data)], { type: "text/csv;charset=utf-8" }));
    save(address, `${name}.csv`);
    setTimeout(() => URL.revokeObjectURL(address), 10000);
    return;
  }
  const paper = getComputedStyle(document.documentElement).getPropertyValue("--card").trim();
  const format = kind.toLowerCase();
  const figure = { data: node.data, layout: { ...node.layout, paper_bgcolor: paper, plot_bgcolor: paper } };
  save(await window.Plotly.toImage(figure, { format, width: node.clientWidth, height: node.clientHeight, scale: format === "png" ? 2 : 1 }), `${name}.${format}`);
}

function save(address, name) {
  const link = el("a", { href: address, download: name });
  document.body.append(link);
  link.click();
  link.remove();
}

export function tableOfChart(traces) {
  const rows = [["name", "x", "y", "value"]];
  traces.forEach((trace, place) => {
    const name = plainName(trace, place);
    if (trace.type === "heatmap") trace.z.forEach((line, row) => line.forEach((value, column) => rows.push([name, trace.x[column], trace.y[row], value])));
    else Array.from(trace.x ?? []).forEach((x, index) => rows.push([name, x, trace.y[index], ""]));
  });
  return rows.map((row) => row.map(cellText).join(",")).join("\r\n");
}

// A text that begins like a formula would be computed by a spreadsheet, so it is quoted.
function cellText(value) {
  if (value === null || value === undefined) return "";
  if (typeof value === "number") return String(value);
  const text = /^[=+\-@\t\r]/.test(value) ? `'${value}` : String(value);
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}
