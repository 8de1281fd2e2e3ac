// Ranges and ticks of the axes of charts.

import { short } from "./format.js";

const ROUNDING = 1e-9; // a mean of equal values can differ from them by this

export function stepAxis(largest, log) {
  if (!log) return largest < 8 ? { dtick: 1 } : {}; // no half steps
  return stepTicks(largest);
}

// A logarithmic axis has no step 0: it is drawn at the left end, with a label.
function stepTicks(largest) {
  const values = [0.5];
  const texts = ["0"];
  for (let power = 1; power <= largest * 1.01; power *= 10) {
    values.push(power);
    texts.push(power >= 1e4 ? `${power / 1000}k` : String(power));
  }
  return { tickmode: "array", tickvals: values, ticktext: texts };
}

// Ticks of a logarithmic axis, fewer if it spans more decades, and round numbers if it spans less than half a decade.
export function logTicks(all) {
  const values = all.filter((value) => value > 0 && Number.isFinite(value));
  const low = values.reduce((a, b) => Math.min(a, b), Infinity);
  const high = values.reduce((a, b) => Math.max(a, b), 0);
  const decades = values.length ? Math.log10(high / low) : 0;
  if (decades > ROUNDING && decades < 0.5) {
    const rounded = roundNumbers(low, high);
    const texts = rounded.map((value) => short(value));
    const different = new Set(texts).size === texts.length;
    return { type: "log", tickmode: "array", tickvals: rounded, ticktext: different ? texts : rounded.map(String) };
  }
  // Without a format, ticks between powers of ten show their first digit alone.
  const ticks = decades > 2.5 ? { dtick: decades > 8 ? 2 : 1 } : { dtick: decades > 0.7 ? "D2" : "D1", tickformat: "~g" };
  return { type: "log", ...ticks };
}

// Three to six multiples of 1, 2 or 5 times a power of ten between two numbers.
function roundNumbers(low, high) {
  const power = 10 ** Math.floor(Math.log10((high - low) / 3));
  const step = [5, 2, 1].map((factor) => factor * power).find((one) => Math.floor(high / one) - Math.ceil(low / one) >= 2) ?? power;
  const first = Math.ceil(low / step);
  return Array.from({ length: Math.floor(high / step) - first + 1 }, (_, index) => Number(((first + index) * step).toPrecision(12)));
}

// Ticks of colors that stand for powers of ten.
export function powerTicks(low, high) {
  const every = Math.max(1, Math.ceil((high - low) / 6));
  const powers = Array.from({ length: Math.max(Math.floor(high) - Math.ceil(low) + 1, 0) }, (_, index) => Math.ceil(low) + index).filter((_, index) => index % every === 0);
  return powers.length > 1 ? { tickmode: "array", tickvals: powers, ticktext: powers.map((power) => `10<sup>${power}</sup>`) } : { tickmode: "array", tickvals: [low, high], ticktext: [low, high].map((power) => short(10 ** power)) };
}

// A constant would be drawn between itself minus one and plus one, where a small one looks like zero.
export function constantRange(values) {
  const numbers = values.filter((value) => value !== null && Number.isFinite(value));
  const [first] = numbers;
  if (!first || numbers.some((value) => Math.abs(value - first) > ROUNDING * Math.abs(first))) return {};
  return { range: first > 0 ? [0, 2 * first] : [2 * first, 0] };
}
