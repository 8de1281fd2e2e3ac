// Diagnosis of each layer.

import { card, el, fill, note, numberRow } from "./dom.js";
import { layerTitle, looksLogarithmic, sentence, short, titleOf } from "./format.js";
import { chip, strips } from "./strips.js";
import { getSeries, getTexts } from "./source.js";

const NUMBERS = ["nfc", "centered_nfc", "centered_ratio", "fact", "weight_change", "ck.kta", "w.alpha"];

export async function wordsTab(body, run, alive, _view, segment) {
  const draw = async (now) => {
    const found = await getTexts(run.id, "words", segment);
    const there = NUMBERS.filter((name) => Object.values(now.layers ?? {}).some((names) => names.includes(name)));
    const columns = await Promise.all(there.map((name) => getSeries(run.id, name, { width: 100, segment })));
    if (!alive()) return;
    const readings = found.words.filter((line) => line.name === "reading");
    if (!readings.length) {
      fill(body, note("No layer has a diagnosis yet. featlearn.Monitor diagnoses each layer as lazy, learning, aligned, ... at each measurement."));
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
        "article", { class: "card layer" }, el("h2", {}, layerTitle(line.layer), " ", chip(word)),
        note(sentence(found.meanings[word]), ""), reason ? note(sentence(reason), "soft small") : null,
        numberRow(numbers.map(([name, curve]) => [[shortTitle(name), titleOf(name)], short(curve.values.at(-1))])),
      );
    });
    fill(body, el("div", { class: "grid three" }, blocks), card("Diagnoses over the training", strips(readings, "Diagnoses of the layers", looksLogarithmic(now.matrix_steps ?? []))));
  };
  await draw(run);
  return draw;
}

function shortTitle(name) {
  return {
    nfc: "NFC", centered_nfc: "centered NFC", centered_ratio: "share of change", fact: "FACT", weight_change: "moved",
    "ck.kta": "KTA", "w.alpha": "tail α",
  }[name] ?? name;
}
