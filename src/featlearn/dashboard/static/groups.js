// Groups of runs by a value, and mean and spread of numbers.

import { plainValue } from "./format.js";

// Groups in natural order of their values; runs without a value come last.
export function groupRuns(runs, value) {
  const groups = new Map();
  for (const run of runs) {
    const own = value(run) ?? null;
    const key = own === null ? "" : plainValue(own);
    if (!groups.has(key)) groups.set(key, { key, value: own, runs: [] });
    groups.get(key).runs.push(run);
  }
  return [...groups.values()].sort((a, b) => compareValues(a.value, b.value, 1));
}

// What is not there comes last, whichever way the rest runs.
export function compareValues(a, b, direction) {
  const [first, second] = [a ?? null, b ?? null];
  if (first === null || second === null) return (first === null) - (second === null);
  if (typeof first === "number" && typeof second === "number") return direction * (first - second);
  return direction * plainValue(first).localeCompare(plainValue(second), undefined, { numeric: true });
}

// Mean, standard deviation (of a sample), smallest and largest number; null without numbers.
export function spreadOf(values) {
  const numbers = values.filter((value) => typeof value === "number" && Number.isFinite(value));
  if (!numbers.length) return null;
  const mean = numbers.reduce((sum, value) => sum + value, 0) / numbers.length;
  const squares = numbers.reduce((sum, value) => sum + (value - mean) ** 2, 0);
  return { count: numbers.length, mean, deviation: numbers.length > 1 ? Math.sqrt(squares / (numbers.length - 1)) : null, low: Math.min(...numbers), high: Math.max(...numbers) };
}

// The value of a curve at a place between its points; null outside of them.
export function valueAt(places, values, place) {
  let [low, high] = [0, places.length - 1];
  if (high < 0 || place < places[0] || place > places[high]) return null;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (places[middle] <= place) low = middle;
    else high = middle;
  }
  if (places[low] === place) return values[low];
  if (places[high] === place) return values[high];
  if (values[low] === null || values[high] === null) return null;
  return values[low] + ((place - places[low]) / (places[high] - places[low])) * (values[high] - values[low]);
}

const MOST_PLACES = 300;

// Mean and band of several curves over the places that any of them has.
export function bandOf(curves, spread) {
  const all = [...new Set(curves.flatMap((curve) => curve.x ?? curve.steps))].filter((place) => place !== null).sort((a, b) => a - b);
  const every = Math.ceil(all.length / MOST_PLACES);
  const places = all.filter((_, index) => index % every === 0 || index === all.length - 1);
  const band = { places: [], mean: [], low: [], high: [], counts: [] };
  for (const place of places) {
    const found = spreadOf(curves.map((curve) => valueAt(curve.x ?? curve.steps, curve.values, place)));
    if (!found) continue;
    const half = spread === "error" ? (found.deviation ?? 0) / Math.sqrt(found.count) : found.deviation ?? 0;
    band.places.push(place);
    band.mean.push(found.mean);
    band.low.push(spread === "range" ? found.low : found.mean - half);
    band.high.push(spread === "range" ? found.high : found.mean + half);
    band.counts.push(found.count);
  }
  return band;
}
