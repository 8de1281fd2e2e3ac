// Matrices at a step, two side by side.

import { heatChart } from "./charts.js";
import { choice, el, fill, note, slider } from "./dom.js";
import { layerTitle, short } from "./format.js";
import { getMatrix } from "./source.js";

const matrixState = { run: null, place: null, names: [] };

export async function matricesTab(body, run, alive) {
  let steps = run.matrix_steps ?? [];
  let names = Object.keys(run.matrices ?? {});
  if (!names.length) {
    fill(body, note("No matrices were stored. Pass matrices=(\"spectra\", \"nfm\", \"agop\") to featlearn.Monitor to show them here for each step."));
    return async (now) => { if (Object.keys(now.matrices ?? {}).length && alive()) await matricesTab(body, now, alive); };
  }
  if (matrixState.run !== run.id || !matrixState.names.every((name) => names.includes(name))) {
    const first = names.find((name) => name.endsWith("/nfm")) ?? names[0];
    const second = names.find((name) => name.endsWith("/agop")) ?? names.find((name) => name !== first);
    Object.assign(matrixState, { run: run.id, place: steps.length - 1, names: second ? [first, second] : [first] });
  }
  matrixState.place = Math.min(matrixState.place, steps.length - 1);
  const head = el("div", { class: "controls" });
  const panels = matrixState.names.map((_, place) => matrixPanel(run, () => names, () => steps, place, alive));
  const all = () => Promise.all(panels.map((one) => one.draw()));
  const top = () => fill(head, slider("Step", steps.length, matrixState.place, (place) => String(steps[place]), (place) => { matrixState.place = place; all(); }));
  top();
  fill(
    body, head, el("div", { class: "grid" }, panels.map((one) => one.node)),
    run.all_matrix_steps > steps.length ? note(`This file contains ${steps.length} of ${run.all_matrix_steps} steps.`) : null,
  );
  await all();
  return async (now) => {
    const atEnd = matrixState.place === steps.length - 1;
    steps = now.matrix_steps;
    names = Object.keys(now.matrices);
    if (atEnd) matrixState.place = steps.length - 1;
    // The slider is not replaced while it has the focus.
    if (!head.contains(document.activeElement) || atEnd) top();
    if (atEnd) await all();
  };
}

function matrixTitle(name) {
  const at = name.lastIndexOf("/");
  return at < 0 ? name : `${layerTitle(name.slice(0, at))} · ${name.slice(at + 1).toUpperCase()}`;
}

function matrixPanel(run, names, steps, place, alive) {
  const figure = el("div", { class: "figure square" });
  const words = el("p", { class: "soft small" });
  const name = () => matrixState.names[place];
  const draw = async () => {
    const [asked, step] = [name(), steps()[matrixState.place]];
    try {
      const found = await getMatrix(run.id, step, asked);
      if (!alive() || asked !== name() || step !== steps()[matrixState.place]) return;
      const size = `${found.shape[0]} × ${found.shape[1]}`;
      words.textContent = `${found.reduced ? `${size}, shown as means of blocks of ${found.block[0]} × ${found.block[1]}` : size}; from ${short(found.low)} to ${short(found.high)}${found.groups > 1 ? `; the first of ${found.groups} groups` : ""}`;
      await heatChart(figure, `${asked} at step ${step}`, found, run.kind === "rfm" ? run.features : null);
      figure.dataset.step = String(step);
    } catch (error) {
      words.textContent = error.message;
    }
  };
  const pick = choice("Matrix", names().map((one) => [one, matrixTitle(one)]), name(), (value) => { matrixState.names[place] = value; draw(); });
  return { node: el("section", { class: "card" }, el("div", { class: "controls" }, pick), figure, words), draw };
}
