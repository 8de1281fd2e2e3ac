// Metrics over the steps, of the training and of the layers.

import { LABEL } from "./curve_chart.js";
import { el, fill, freshId, note } from "./dom.js";
import { titleOf } from "./format.js";
import { inModelOrder, layerLabel } from "./layer_names.js";
import { panelGrid } from "./panels.js";
import { getSeries } from "./source.js";

const WANTED = [["loss", "train_loss", "score"], ["nfc"], ["centered_nfc", "centered_ratio", "weight_change"], ["fact", "weight_change", "centered_ratio"], ["ck.kta"], ["w.effective_rank", "w.alpha"]];

export function allNames(run) {
  return [...new Set([...(run.quantities ?? []), ...Object.values(run.layers ?? {}).flat()])];
}

function firstChoices(names) {
  const chosen = [];
  for (const some of WANTED) {
    const found = some.find((name) => names.includes(name) && !chosen.includes(name));
    if (found) chosen.push(found);
  }
  for (const name of names) if (chosen.length < 4 && !chosen.includes(name) && !/^monitor\.|^epoch$|^time$/.test(name)) chosen.push(name);
  return chosen;
}

// A field for patterns of layers, kept in the address; `react` is called after a change.
export function layerFilter(view, react) {
  const id = freshId("layers");
  const input = el("input", { type: "search", id, placeholder: "all, or blocks.*.attn.*", maxlength: 500, value: view.text("layers"), spellcheck: "false" });
  let timer = 0;
  input.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(() => { view.replace({ layers: input.value.trim() }); react(); }, 250);
  });
  return el("span", { class: "control" }, el("label", { for: id }, "Layers"), input);
}

export async function curvesTab(body, first, alive, view, segment) {
  let run = first;
  if (!allNames(run).length) {
    fill(body, note(run.status === "running" ? "No metrics have been logged yet. Curves appear with the first step." : "This run has not logged any metrics."));
    return async (now) => { if (allNames(now).length && alive()) await curvesTab(body, now, alive, view, segment); };
  }
  const source = {
    axes: () => run.axes ?? ["step"], names: () => allNames(run), layersOf: () => null, first: () => firstChoices(allNames(run)),
    // Layers are measured at fewer steps than the loss is logged.
    probe: () => {
      const ofLayers = firstChoices(allNames(run)).find((name) => !(run.quantities ?? []).includes(name));
      return getSeries(run.id, ofLayers ?? firstChoices(allNames(run))[0], { width: 200, segment });
    },
    title: (name) => `${titleOf(name)} over the steps`,
    load: async (name, _layer, options) => {
      const ofRun = (run.quantities ?? []).includes(name) && !Object.values(run.layers ?? {}).some((names) => names.includes(name));
      const found = await getSeries(run.id, name, { ...options, segment, layers: ofRun ? "" : view.text("layers") });
      const message = found.left_out ? `${found.left_out} more layers are not shown: select some by a pattern.` : found.curves.length ? "" : "No layer matches.";
      return { curves: inModelOrder(run, found.curves).map((curve) => ({ ...curve, label: layerLabel(run, curve.layer), brief: layerLabel(run, curve.layer, LABEL), named: curve.layer !== null })), message };
    },
  };
  const panels = await panelGrid(view, source, alive);
  if (!panels || !alive()) return null;
  const filter = Object.keys(run.layers ?? {}).length > 1 ? layerFilter(view, panels.drawAll) : null;
  fill(body, el("div", { class: "controls" }, filter), panels.tools, panels.grid);
  await panels.begin();
  return async (now) => {
    const isNew = allNames(now).length !== allNames(run).length;
    run = now;
    if (isNew) panels.drawTools();
    await panels.drawAll();
  };
}
