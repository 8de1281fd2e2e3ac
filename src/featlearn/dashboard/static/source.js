// Source of the data: the server, or the page itself if it is an exported file.

import { matchesLayers } from "./filter.js";
import { valueAt } from "./groups.js";

const heldElement = document.getElementById("held");
const held = heldElement ? JSON.parse(heldElement.textContent) : null;

export const isFile = held !== null;
export const isSingle = held !== null && held.single;

export function quoted(text) {
  return encodeURIComponent(text);
}

async function fromServer(address) {
  let answer;
  try {
    answer = await fetch(`/api/${address}`, { headers: { accept: "application/json" } });
  } catch {
    throw new Error("The server does not respond. Check that `featlearn dashboard` is running.");
  }
  const content = await answer.json().catch(() => ({ error: `The server responded with status ${answer.status}.` }));
  if (!answer.ok) throw new Error(content.error ?? `The server responded with status ${answer.status}.`);
  return content;
}

function fromFile(address) {
  if (!Object.hasOwn(held.answers, address)) throw new Error("The file does not contain this. Open the runs with `featlearn dashboard`.");
  const content = held.answers[address];
  if (content.error) throw new Error(content.error);
  return content;
}

export async function get(address) {
  return isFile ? fromFile(address) : fromServer(address);
}

// Options: layer, layers (patterns), width, from, to, log, mean, axis, segment.
export async function getSeries(id, name, { layer, layers = "", width = 800, from, to, log, mean, axis = "step", segment } = {}) {
  if (isFile) {
    const found = seriesInFile(id, name, { axis, mean, segment, needed: true });
    return { ...found, curves: found.curves.filter((curve) => (layer === undefined || (curve.layer ?? "") === layer) && matchesLayers(layers, curve.layer ?? "")) };
  }
  let query = `name=${quoted(name)}&width=${Math.round(Math.min(Math.max(width, 100), 4000))}&axis=${axis}`;
  if (layer !== undefined) query += `&layer=${quoted(layer)}`;
  if (layers) query += `&layers=${quoted(layers)}`;
  query += rangeQuery(from, to);
  if (log) query += "&log=1";
  if (mean) query += "&mean=1";
  return fromServer(`runs/${id}/series?${query}${segmentQuery(segment)}`);
}

function rangeQuery(from, to) {
  return from === undefined ? "" : `&from=${Math.max(0, Math.floor(from))}&to=${Math.max(0, Math.ceil(to))}`;
}

export function segmentQuery(segment) {
  return segment ? `&segment=${segment}` : "";
}

// A file has every metric once, and the means of those that are reduced; other axes as positions of some steps.
function seriesInFile(id, name, { axis, mean, segment, needed = false }) {
  const address = `runs/${id}/series?name=${quoted(name)}${segmentQuery(segment)}`;
  const chosen = mean && Object.hasOwn(held.answers, `${address}&mean=1`) ? `${address}&mean=1` : address;
  if (!needed && !Object.hasOwn(held.answers, chosen)) return { curves: [] };
  const found = fromFile(chosen);
  if (axis === "step") return found;
  const known = held.answers[`runs/${id}/axis?name=${axis}${segmentQuery(segment)}`];
  return { ...found, curves: found.curves.map((curve) => ({ ...curve, x: curve.steps.map((step) => (known ? valueAt(known.steps, known.x, step) : null)) })) };
}

export async function getMatrix(id, step, name, segment) {
  return get(`runs/${id}/matrices/${step}/${quoted(name)}${segment ? `?segment=${segment}` : ""}`);
}

export async function getSpectrum(id, step, layer, kind, segment) {
  return get(`runs/${id}/spectra/${step}?layer=${quoted(layer ?? "")}&kind=${quoted(kind)}${segmentQuery(segment)}`);
}

// Texts over the steps ("words"), or findings.
export async function getTexts(id, what, segment) {
  return get(`runs/${id}/${what}${segment ? `?segment=${segment}` : ""}`);
}

// The settings in which runs differ, of the readable ones.
export async function getDifferences(ids) {
  if (!isFile && ids.length <= 2 * AT_ONCE) return (await fromServer(`compare?ids=${ids.join(",")}`)).settings;
  return null;
}

export async function getLayers() {
  return get("layers");
}

// Summaries (last, smallest, largest) of a metric of a layer, by run.
export async function getValues(layer, name, runs) {
  const values = new Map();
  if (isFile) {
    for (const run of runs) {
      const curve = held.answers[`runs/${run.id}/series?name=${quoted(name)}`]?.curves.find((one) => (one.layer ?? "") === layer);
      const numbers = curve ? curve.values.filter((value) => value !== null) : [];
      if (numbers.length) values.set(run.id, [curve.values.at(-1), Math.min(...numbers), Math.max(...numbers)]);
    }
    return values;
  }
  for (let loading = 1; loading; ) {
    const part = await fromServer(`values?layer=${quoted(layer)}&name=${quoted(name)}`);
    for (const [id, summary] of Object.entries(part.values)) values.set(id, summary);
    loading = part.loading;
  }
  return values;
}

const AT_ONCE = 50; // runs of a request

// One metric of many runs, read in parts; `react` is called with the curves of each part.
export async function getManyCurves(ids, name, layer, { width = 400, mean = false, axis = "step", from, to } = {}, react = () => {}) {
  const curves = [];
  const options = `&width=${Math.round(width)}&axis=${axis}${mean ? "&mean=1" : ""}${rangeQuery(from, to)}`;
  for (let start = 0; start < ids.length; start += AT_ONCE) {
    const some = ids.slice(start, start + AT_ONCE);
    curves.push(...(isFile ? curvesInFile(some, name, layer, axis, mean) : (await fromServer(`compare?ids=${some.join(",")}&name=${quoted(name)}&layer=${quoted(layer)}${options}`)).curves));
    if (react(curves) === false) break;
  }
  return curves;
}

function curvesInFile(ids, name, layer, axis, mean) {
  return ids.flatMap((id) => seriesInFile(id, name, { axis, mean }).curves.filter((curve) => (curve.layer ?? "") === layer).map((curve) => ({ ...curve, id })));
}
