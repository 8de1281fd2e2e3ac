// Diagnosis of each layer.

import { card, el, fill, note, numberRow } from "./dom.js";
import { matchesLayers } from "./filter.js";
import { looksLogarithmic, sentence, short, titleOf } from "./format.js";
import { inModelOrder, layerLabel } from "./layer_names.js";
import { chip, strips } from "./strips.js";
import { getSeries, getTexts } from "./source.js";
import { layerFilter } from "./tab_curves.js";

const NUMBERS = ["nfc", "centered_nfc", "centered_ratio", "fact", "weight_change", "ck.kta", "w.alpha"];

export async function wordsTab(body, run, alive, view, segment) {
  let last = run;
  const place = el("div");
  const filter = Object.keys(run.layers ?? {}).length > 1 ? layerFilter(view, () => draw(last)) : null;
  const draw = async (now) => {
    last = now;
    const found = await getTexts(run.id, "words", segment);
    const there = NUMBERS.filter((name) => Object.values(now.layers ?? {}).some((names) => names.includes(name)));
    const columns = await Promise.all(there.map((name) => getSeries(run.id, name, { width: 100, segment })));
    if (!alive()) return;
    const all = inModelOrder(now, found.words.filter((line) => line.name === "reading"));
    const readings = all.filter((line) => matchesLayers(view.text("layers"), line.layer ?? ""));
    if (!readings.length) {
      fill(place, all.length ? note("No layer matches.") : note("No layer has a diagnosis yet. featlearn.Monitor diagnoses each layer as lazy, learning, aligned, ... at each measurement."));
      return;
    }
    const reasons = new Map(found.words.filter((line) => line.name === "reason").map((line) => [line.layer, line.stretches.at(-1)[2]]));
    const blocks = readings.map((line) => {
      const word = line.stretches.at(-1)[2];
      const reason = reasons.get(line.layer) ?? "";
      const numbers = there
        .map((name, place) => [name, columns[place].curves.find((curve) => curve.layer === line.layer)])
        .filter(([, curve]) => curve && curve.values.at(-1) !== null);
      return el(
        "article", { class: "card layer" }, el("h2", {}, layerLabel(now, line.layer), " ", chip(word)),
        note(sentence(found.meanings[word]), ""), reason ? note(sentence(reason), "soft small") : null,
        numberRow(numbers.map(([name, curve]) => [[shortTitle(name), titleOf(name)], short(curve.values.at(-1))])),
      );
    });
    fill(place, card("Diagnoses over the training", strips(readings, "Diagnoses of the layers", looksLogarithmic(now.matrix_steps ?? []))), el("div", { class: "grid three" }, blocks));
  };
  fill(body, filter ? el("div", { class: "controls" }, filter) : null, place);
  await draw(run);
  return draw;
}

function shortTitle(name) {
  return {
    nfc: "NFC", centered_nfc: "centered NFC", centered_ratio: "share of change", fact: "FACT", weight_change: "moved",
    "ck.kta": "KTA", "w.alpha": "tail α",
  }[name] ?? name;
}
