// Matrices at a step, two side by side.

import { keepPlace, placeOf } from "./address.js";
import { heatChart } from "./charts.js";
import { choice, el, fill, note, slider } from "./dom.js";
import { layerTitle, short } from "./format.js";
import { getMatrix } from "./source.js";

export async function matricesTab(body, run, alive, view, segment) {
  let steps = run.matrix_steps ?? [];
  let names = Object.keys(run.matrices ?? {});
  if (!names.length) {
    fill(body, note("No matrices were stored. Pass matrices=(\"spectra\", \"nfm\", \"agop\") to featlearn.Monitor to show them here for each step."));
    return async (now) => { if (Object.keys(now.matrices ?? {}).length && alive()) await matricesTab(body, now, alive, view, segment); };
  }
  const first = names.find((name) => name.endsWith("/nfm")) ?? names[0];
  const second = names.find((name) => name !== first && name.endsWith("/agop")) ?? names.find((name) => name !== first);
  const listed = view.list("matrix").filter((name) => names.includes(name)).slice(0, 2);
  const shown = { place: placeOf(steps, view), names: listed.length ? listed : second ? [first, second] : [first] };
  const panels = shown.names.map((_, place) => matrixPanel(run, { names: () => names, steps: () => steps, place, alive, shown: shown, view, segment }));
  const all = () => Promise.all(panels.map((one) => one.draw()));
  const steering = slider("Step", steps.length, shown.place, (place) => String(steps[place]), (place) => { shown.place = place; keepPlace(view, steps, place); all(); });
  fill(
    body, el("div", { class: "controls" }, steering), el("div", { class: "grid" }, panels.map((one) => one.node)),
    run.all_matrix_steps > steps.length ? note(`This file contains ${steps.length} of ${run.all_matrix_steps} steps.`) : null,
  );
  await all();
  return async (now) => {
    const atEnd = shown.place === steps.length - 1;
    steps = now.matrix_steps;
    names = Object.keys(now.matrices);
    if (atEnd) shown.place = steps.length - 1;
    steering.adjust(steps.length, shown.place);
    if (atEnd) await all();
  };
}

function matrixTitle(name) {
  const at = name.lastIndexOf("/");
  return at < 0 ? name : `${layerTitle(name.slice(0, at))} · ${name.slice(at + 1).toUpperCase()}`;
}

function matrixPanel(run, { names, steps, place, alive, shown, view, segment }) {
  const figure = el("div", { class: "figure square" });
  const words = el("p", { class: "soft small" });
  const name = () => shown.names[place];
  const draw = async () => {
    const [asked, step] = [name(), steps()[shown.place]];
    try {
      const found = await getMatrix(run.id, step, asked, segment);
      if (!alive() || asked !== name() || step !== steps()[shown.place]) return;
      const size = `${found.shape[0]} × ${found.shape[1]}`;
      words.textContent = `${found.reduced ? `${size}, shown as means of blocks of ${found.block[0]} × ${found.block[1]}` : size}; from ${short(found.low)} to ${short(found.high)}${found.groups > 1 ? `; the first of ${found.groups} groups` : ""}`;
      await heatChart(figure, `${asked} at step ${step}`, found, run.kind === "rfm" ? run.features : null);
      figure.dataset.step = String(step);
    } catch (error) {
      words.textContent = error.message;
    }
  };
  const pick = choice("Matrix", names().map((one) => [one, matrixTitle(one)]), name(), (value) => { shown.names[place] = value; view.set({ matrix: shown.names }); draw(); });
  return { node: el("section", { class: "card" }, el("div", { class: "controls" }, pick), figure, words), draw };
}
