// Findings of a run, as a timeline of each layer and as a table; each leads to its curve and step.

import { linkTo } from "./address.js";
import { card, el, fill, note } from "./dom.js";
import { layerTitle, sentence, short } from "./format.js";
import { inModelOrder, layerLabel } from "./layer_names.js";
import { getTexts } from "./source.js";
import { stripName, timeMarks } from "./strips.js";
import { allNames } from "./tab_curves.js";
import { replaceTable, sortable } from "./tables.js";

// Metrics that show a fault, the best first.
const SHOWN_BY = new Map(Object.entries({
  "dead units": ["signal.dead_share", "signal.activation_scale"], "dead layer": ["signal.dead_share", "signal.activation_scale"],
  "vanishing gradients": ["signal.gradient_norm"], "exploding gradients": ["signal.gradient_norm"], divergence: ["loss", "train_loss"],
  "learning rate too high": ["loss", "signal.update_ratio"], "learning rate too low": ["signal.update_ratio", "loss"], "lazy layer": ["weight_change", "centered_ratio"],
  "rank collapse": ["ck.effective_rank", "w.effective_rank"], "shuffled labels": ["ck.kta", "ntk.kta", "loss"], "frozen layer": ["signal.update_ratio", "weight_change"],
  saturation: ["signal.saturated_share"], "loss spike": ["loss", "signal.loss_spike"],
}));

function curveLink(run, finding, segment) {
  const names = allNames(run);
  const wanted = [...(SHOWN_BY.get(finding.fault) ?? []), "loss", "nfc", "weight_change"].filter((name) => names.includes(name));
  return linkTo(`run/${run.id}/curves`, { metric: [...new Set(wanted)].slice(0, 2), step: finding.first, layers: finding.layer === null ? null : literally(finding.layer), segment });
}

// A pattern that matches one layer only.
function literally(layer) {
  return layer.replace(/\s/g, "?");
}

export async function findingsTab(body, first, alive, _view, segment) {
  const order = { sort: null, down: false };
  const [lead, lines, place] = [note("", "lead"), el("div"), el("div")];
  const draw = async (run) => {
    const answer = await getTexts(run.id, "findings", segment);
    if (!alive()) return;
    const found = { ...answer, findings: inModelOrder(run, answer.findings) };
    const damaged = found.damaged ? note(`${found.damaged} stored findings cannot be read.`, "trouble") : null;
    if (!found.findings.length) {
      fill(body, note(run.status === "running" ? "No findings so far." : "No findings: no fault was detected in this run, or it was not monitored."), damaged);
      return;
    }
    const open = found.findings.filter((finding) => finding.open).length;
    const table = () => replaceTable(place, sortable(findingColumns(run, segment), found.findings, order, table));
    lead.textContent = `${found.findings.length} findings, ${open} of which still hold.${found.left_out ? ` ${found.left_out} more are not shown.` : ""}`;
    if (!place.isConnected) fill(body, el("div", {}, damaged), lead, card("Over the training", lines), card("All findings", place));
    else fill(body.firstElementChild, damaged);
    replaceTable(lines, timeline(run, found, segment));
    table();
  };
  await draw(first);
  return draw;
}

function findingColumns(run, segment) {
  const rank = { problem: 0, warning: 1, note: 2 };
  return [
    { key: "layer", title: "Layer", value: (one) => one.layer ?? "", cell: (one) => layerLabel(run, one.layer) },
    { key: "fault", title: "Finding", value: (one) => one.fault, cell: (one) => [el("a", { href: curveLink(run, one, segment), "data-key": `fault-${keyOf(one)}` }, one.fault), el("div", {}, severityMark(one))] },
    { key: "severity", title: "Severity", value: (one) => rank[one.severity], cell: (one) => one.severity },
    { key: "steps", title: "Steps", number: true, value: (one) => one.first, cell: (one) => `${short(one.first)} – ${one.open ? "now" : short(one.last)}` },
    { key: "confidence", title: "Confidence", number: true, value: (one) => one.confidence, cell: (one) => (one.confidence === null ? "–" : `${Math.round(100 * one.confidence)}%`) },
    { key: "evidence", title: "Evidence and advice", wide: true, cell: (one) => [sentence(one.evidence), el("div", { class: "soft" }, sentence(one.advice))] },
  ];
}

function keyOf(finding) {
  return JSON.stringify([finding.layer, finding.fault, finding.first]);
}

function severityMark(one) {
  return one.open ? el("span", { class: `mark f-${one.severity}` }, "holds") : el("span", { class: "soft small" }, "over");
}

// One row per layer and fault; each bar is a link to the curve.
function timeline(run, found, segment) {
  const last = Math.max(found.last_step, 1);
  const rows = new Map();
  for (const finding of found.findings) {
    const key = JSON.stringify([finding.layer, finding.fault]);
    if (!rows.has(key)) rows.set(key, []);
    rows.get(key).push(finding);
  }
  const lines = [...rows.values()].map((some) => {
    const [{ layer, fault }] = some;
    const bar = el("div", { class: "strip" }, some.map((finding) => {
      const part = el("a", {
        class: `f-${finding.severity}`, href: curveLink(run, finding, segment), "data-key": `bar-${keyOf(finding)}`, title: `${fault}, steps ${finding.first} to ${finding.last}: ${finding.evidence}`,
        "aria-label": `${layerTitle(layer)}, ${fault}, ${finding.severity}, steps ${finding.first} to ${finding.last}: show the curve`,
      });
      part.style.left = `${(100 * finding.first) / last}%`;
      part.style.width = `${Math.max((100 * (finding.last - finding.first)) / last, 0.8)}%`;
      return part;
    }));
    return el("div", { class: "strip-row finding-row" }, stripName(layer), el("span", { class: "strip-name soft", title: fault }, fault), bar);
  });
  return el(
    "div", { class: "strips", role: "group", "aria-label": "Findings over the steps" }, lines,
    el("div", { class: "strip-row finding-row" }, el("span", { class: "strip-name soft" }, "step"), el("span"), timeMarks(last, false)),
    el("p", { class: "key" }, ["problem", "warning", "note"].map((one) => el("span", {}, el("i", { class: `dot f-${one}` }), one))),
  );
}
