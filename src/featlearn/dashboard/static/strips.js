// Diagnoses or phases over the training, as one strip of colored intervals per layer.

import { el } from "./dom.js";
import { layerTitle, short } from "./format.js";

// One class per diagnosis or phase; the colors are in style.css, and the text is always shown too.
const CLASSES = {
  "invariant bulk": "p-invariant", "bulk + spikes": "p-spikes", "heavy tail": "p-heavy", "rank collapse": "p-collapse",
  undecided: "p-undecided", untrained: "p-undecided", collapsed: "p-collapse", "at convergence": "p-converged",
  "heavy-tailed": "p-heavy", aligned: "p-spikes", learning: "p-learning", lazy: "p-invariant",
};

export function wordClass(word) {
  return Object.hasOwn(CLASSES, word) ? CLASSES[word] : "p-undecided";
}

export function chip(word, meaning = "") {
  return el("span", { class: `chip ${wordClass(word)}`, title: meaning }, word);
}

// A name that does not fit is cut at its beginning, since its end is more specific.
export function stripName(layer) {
  return el("span", { class: "strip-name from-end", title: layer ?? "" }, el("bdi", {}, layerTitle(layer)));
}

// Lines are {layer, stretches: [[first, last, word], ...]}; steps run on a logarithmic axis if it is `wide`.
export function strips(lines, name, wide) {
  const last = Math.max(1, ...lines.flatMap((line) => line.stretches.map((part) => part[1])));
  const place = (step) => stripPlace(step, last, wide);
  const rows = lines.map((line) => {
    const bar = el("div", { class: "strip", role: "img", "aria-label": line.stretches.map(([first, end, word]) => `${word}, steps ${first} to ${end}`).join("; ") });
    line.stretches.forEach(([first, end, word], index) => {
      const next = line.stretches[index + 1];
      const from = place(first);
      const to = next ? place(next[0]) : 100;
      const part = el("span", { class: wordClass(word), title: `${word}, steps ${first} to ${end}` });
      part.style.left = `${from}%`;
      part.style.width = `${Math.max(to - from, 0.6)}%`;
      bar.append(part);
    });
    const now = line.stretches.at(-1)[2];
    return el("div", { class: "strip-row" }, stripName(line.layer), bar, chip(now));
  });
  const words = [...new Set(lines.flatMap((line) => line.stretches.map((part) => part[2])))];
  return el(
    "div", { class: "strips", role: "group", "aria-label": name }, rows,
    el("div", { class: "strip-row" }, el("span", { class: "strip-name soft" }, "step"), timeMarks(last, wide), el("span", { class: "chip-space" })),
    el("p", { class: "key" }, words.map((word) => el("span", {}, el("i", { class: `dot ${wordClass(word)}` }), word))),
  );
}

function stripPlace(step, last, wide) {
  return 100 * (wide ? Math.log1p(step) / Math.log1p(last) : step / last);
}

// The axis of the steps below strips.
export function timeMarks(last, wide) {
  const marks = el("div", { class: "strip-axis", "aria-hidden": "true" });
  for (const value of wide ? powers(last) : roundSteps(last)) {
    const mark = el("span", {}, short(value));
    mark.style.left = `${stripPlace(value, last, wide)}%`;
    marks.append(mark);
  }
  return marks;
}

function roundSteps(last) {
  const size = 10 ** Math.floor(Math.log10(last));
  const gap = Math.max([0.1, 0.2, 0.5, 1, 2].map((part) => part * size).find((one) => last / one <= 6) ?? size, 1);
  return Array.from({ length: Math.floor(last / gap) + 1 }, (_, index) => index * gap);
}

function powers(last) {
  const found = [0];
  for (let power = 1; power <= last; power *= 10) found.push(power);
  return found.length > 6 ? found.filter((_, index) => index % 2 === 0) : found;
}
