// Eigenvalues at a step and at the start, and the phase of each layer over the training.

import { spectrumChart } from "./charts.js";
import { keepPlace, placeOf } from "./address.js";
import { card, choice, definitions, el, fill, note, slider } from "./dom.js";
import { kindTitle, layerTitle, looksLogarithmic, sentence, short } from "./format.js";
import { inModelOrder } from "./layer_names.js";
import { chip, strips } from "./strips.js";
import { getSpectrum, getTexts } from "./source.js";

function apart(name) {
  const at = name.lastIndexOf("/");
  return at < 0 ? [null, name] : [name.slice(0, at), name.slice(at + 1)];
}

export async function spectraTab(body, run, alive, view, segment) {
  let steps = run.matrix_steps ?? [];
  const names = run.spectra ?? [];
  const phases = el("div");
  if (!names.length) {
    fill(body, note("No eigenvalues were stored. featlearn.Monitor stores them by default: matrices=(\"spectra\", ...)."), phases);
    await drawPhases(phases, run, alive, segment);
    return async (now) => { if ((now.spectra ?? []).length && alive()) await spectraTab(body, now, alive, view, segment); };
  }
  const shown = { place: placeOf(steps, view), name: view.one("spectrum", names, null) ?? (await decided(run, names, segment)) };
  if (!alive()) return null;
  const figure = el("div", { class: "figure" });
  const facts = el("div", { class: "facts-card" });
  const head = el("div", { class: "controls" });
  const draw = async () => {
    const [name, step] = [shown.name, steps[shown.place]];
    const [layer, kind] = apart(name);
    try {
      const found = await getSpectrum(run.id, step, layer, kind, segment);
      if (!alive() || name !== shown.name || step !== steps[shown.place]) return;
      fill(facts, tellSpectrum(found));
      await spectrumChart(figure, `Spectrum of ${name} at step ${step}`, found);
      figure.dataset.step = String(step);
    } catch (error) {
      fill(facts, note(error.message, "trouble"));
    }
  };
  const label = (name) => {
    const [layer, kind] = apart(name);
    return layer === null ? kindTitle(kind) : `${layerTitle(layer)} · ${kindTitle(kind)}`;
  };
  const kinds = [...new Set(names.map((name) => apart(name)[1]))];
  const options = kinds.map((kind) => ({ group: kindTitle(kind), options: names.filter((name) => apart(name)[1] === kind).map((name) => [name, label(name)]) }));
  const steering = slider("Step", steps.length, shown.place, (place) => String(steps[place]), (place) => { shown.place = place; keepPlace(view, steps, place); draw(); });
  fill(
    head, choice("Spectrum of", options, shown.name, (value) => { shown.name = value; view.set({ spectrum: value }); draw(); }),
    steering,
  );
  fill(body, el("section", { class: "card" }, head, el("div", { class: "beside" }, el("div", {}, figure), facts)), phases);
  await Promise.all([draw(), drawPhases(phases, run, alive, segment)]);
  return async (now) => {
    const atEnd = shown.place === steps.length - 1;
    steps = now.matrix_steps;
    if (atEnd) shown.place = steps.length - 1;
    steering.adjust(steps.length, shown.place);
    if (atEnd) await draw();
    await drawPhases(phases, now, alive, segment);
  };
}

// Start with the weights of a layer whose phase is decided.
async function decided(run, names, segment) {
  const found = await getTexts(run.id, "words", segment).catch(() => ({ words: [] }));
  const said = (name) => {
    const [layer, kind] = apart(name);
    return found.words.find((line) => line.layer === layer && line.name === `${kind}.phase`)?.stretches.at(-1)[2] ?? "undecided";
  };
  const order = ["bulk + spikes", "heavy tail", "rank collapse", "invariant bulk", "undecided"];
  const weights = names.filter((name) => name.endsWith("/w"));
  weights.sort((a, b) => order.indexOf(said(a)) - order.indexOf(said(b)));
  return weights[0] ?? names[0];
}

function tellSpectrum(found) {
  const zeros = found.histogram.zeros;
  return [
    el("p", { class: "phase" }, found.phase ? chip(found.phase) : null),
    note(found.meaning || "The phase of this spectrum was not measured.", ""),
    found.reason ? note(sentence(found.reason), "soft small") : null,
    definitions([
      ["Eigenvalues", short(found.size)], ["Largest", short(found.top)], ["Edge of the bulk", short(found.edge)],
      ["Initial edge", short(found.initial_edge)], ["New spikes", short(found.count ?? found.spikes.length)],
      ["Tail exponent α", short(found.alpha)], ["Effective rank", short(found.effective_rank)],
      ...(found.kta === null ? [] : [["Aligned with labels (KTA)", short(found.kta)]]),
      ...(zeros[0] + zeros[1] ? [["Zeros at start, now", `${zeros[0]}, ${zeros[1]}`]] : []),
    ]),
  ];
}

async function drawPhases(place, run, alive, segment) {
  const found = await getTexts(run.id, "words", segment).catch(() => ({ words: [] }));
  if (!alive()) return;
  const parts = [];
  for (const kind of ["w", "ck", "ntk"]) {
    const lines = inModelOrder(run, found.words.filter((line) => line.name === `${kind}.phase`));
    if (lines.length) parts.push(el("h3", {}, `Spectrum of the ${kindTitle(kind)}`), strips(lines, `Phases of the ${kindTitle(kind)}`, looksLogarithmic(run.matrix_steps ?? [])));
  }
  fill(place, parts.length ? card("Phases over the training", ...parts) : null);
}
