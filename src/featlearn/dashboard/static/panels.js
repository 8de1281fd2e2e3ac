// Panels of curves with one set of controls: axis, range, smoothing and chosen metrics, all kept in the address.

import { curveChart } from "./curve_chart.js";
import { choice, el, fill, freshId, refill, slider, tick } from "./dom.js";
import { familyOptions, layerTitle, looksLogarithmic, short, titleOf } from "./format.js";

const BOUNDED = /nfc|^fact$|^bfact$|^enfa$|^benfa$|centered_ratio|^alignment$/;
const LOGARITHMIC = /loss|relgrad|\.top$|gradient_norm|update_ratio/;
const AXIS_TITLES = { step: "step", time: "time (seconds)", epoch: "epoch" };
const MOST_PANELS = 24;

export function isBounded(name) {
  return BOUNDED.test(name);
}

export function isLogarithmic(name) {
  return LOGARITHMIC.test(name);
}

// The source has `axes`, `names()`, `layersOf(name)` (null if a panel shows all layers), `first()`: the metrics to start
// with, `load(name, layer, options)`: {curves with labels, message}, and `title(name, layer)`;
// `probe` is like load, for one curve whose steps stand for all.
export async function panelGrid(view, source, alive) {
  const tools = el("div", { class: "controls" });
  const grid = el("div", { class: "grid" });
  const chosen = () => {
    const layers = view.list("layer");
    const known = new Set(source.names());
    const listed = view.list("metric").map((name, place) => [name, layers[place] ?? ""]).filter(([name]) => known.has(name)).slice(0, MOST_PANELS);
    return listed.length || view.has("metric") ? listed : source.first().map((name) => [name, ""]);
  };
  const keep = (pairs) => view.set({ metric: pairs.map(([name]) => name), layer: source.layersOf(pairs[0]?.[0] ?? "") ? pairs.map(([, layer]) => layer) : null });
  const axis = () => view.one("axis", source.axes(), "step");
  let guess = false; // whether the steps are spaced like powers
  const log = () => view.flag("logx", guess && axis() === "step");
  const range = () => shownRange(view);
  const zoomed = (ends) => {
    view.replace(tidyRange(ends));
    drawTools();
    drawAll();
  };
  let panels = [];
  const drawAll = () => Promise.all(panels.map((one) => one.draw()));
  const rebuild = async () => {
    const pairs = chosen();
    panels = pairs.map((pair, place) => panel(place, pair));
    fill(grid, panels.map((one) => one.node));
    drawTools();
    await drawAll();
  };
  const drawTools = () => {
    const again = (values) => { view.set(values); drawTools(); drawAll(); };
    const weight = view.number("smooth", 0);
    refill(
      tools,
      source.axes().length > 1 ? choice("Axis", source.axes().map((one) => [one, { step: "steps", time: "time", epoch: "epochs" }[one]]), axis(), (one) => again({ axis: one === "step" ? null : one, logx: null, from: null, to: null })) : null,
      tick(axis() === "step" ? "logarithmic steps" : "logarithmic axis", log(), (on) => again({ logx: on ? "1" : "0" })),
      slider("Smoothing", 100, Math.round(Math.min(Math.max(weight, 0), 0.99) * 100), (place) => (place ? (place / 100).toFixed(2) : "off"), (place) => { view.replace({ smooth: place ? place / 100 : null }); drawAll(); }),
      rangeInputs(range(), zoomed),
      choice("Add", [["", "metric …"], ...familyOptions(source.names())], "", (name) => { if (name) { keep([...chosen(), [name, source.layersOf(name)?.[0] ?? ""]]); rebuild(); } }),
      ...(source.controls?.(again) ?? []),
    );
  };

  function panel(place, [first, wanted]) {
    let name = first;
    let layer = "";
    const figure = el("div", { class: "figure" });
    const words = el("p", { class: "soft small", role: "status" });
    const key = el("div", { class: "key" });
    const rest = el("span", { class: "controls inner" });
    const keepPair = () => { const pairs = chosen(); pairs[place] = [name, layer]; keep(pairs); };
    const remove = () => { const pairs = chosen(); pairs.splice(place, 1); keep(pairs.length ? pairs : [["", ""]]); rebuild(); };
    const logs = () => (view.list("log").includes(name) ? true : view.list("linear").includes(name) ? false : isLogarithmic(name));
    const setLog = (on) => {
      const without = (list) => view.list(list).filter((one) => one !== name);
      view.set({ log: on ? [...without("log"), name] : without("log"), linear: on ? without("linear") : [...without("linear"), name] });
      drawAll();
    };
    // The list of metrics stays in place, so that typing in it is not interrupted.
    const follow = (asked) => {
      const layers = source.layersOf(name);
      layer = layers && !layers.includes(asked) ? layers[0] ?? "" : asked;
      fill(
        rest, layers && (layers.length > 1 || layers[0]) ? choice("Layer", layers.map((one) => [one, layerTitle(one)]), layer, (value) => { layer = value; keepPair(); draw(); }) : null,
        tick("log", logs(), setLog), el("button", { type: "button", class: "remove", "aria-label": `remove ${titleOf(name)}`, on: { click: remove } }, "×"),
      );
    };
    follow(wanted);
    const head = el("div", { class: "controls" }, choice("Metric", familyOptions(source.names()), name, (value) => { name = value; follow(layer); keepPair(); draw(); }), rest);
    let turn = 0;
    const draw = async () => {
      turn += 1;
      const mine = turn;
      const shown = range();
      const steps = axis() === "step";
      try {
        const found = await source.load(name, layer, { width: figure.clientWidth || 600, axis: axis(), log: steps && log(), ...(shown && steps && !log() ? { from: shown[0], to: shown[1] } : {}) });
        if (!alive() || mine !== turn) return;
        const reduced = found.curves.some((curve) => curve.reduced);
        words.textContent = [reduced ? `Smallest and largest value per pixel${log() || !steps ? "" : "; zoom in for all values"}.` : "", found.message ?? ""].join(" ").trim();
        await curveChart(figure, source.title(name, layer), within(found.curves, shown), {
          log: log(), logValues: logs(), key, bounded: isBounded(name), zero: /kta$|rank$|spikes$|share$/.test(name), along: steps ? "step" : AXIS_TITLES[axis()],
          smooth: Math.min(Math.max(view.number("smooth", 0), 0), 0.99), range: shown, marker: markerPlace(found.curves, view.number("step")), zoomed,
        });
      } catch (error) {
        if (alive()) words.textContent = error.message;
      }
    };
    return { node: el("section", { class: "card" }, head, figure, key, words), draw };
  }

  const first = chosen()[0];
  if (first && !view.has("logx")) {
    const found = await (source.probe ?? source.load)(first[0], source.layersOf(first[0])?.[0] ?? "", { width: 200, axis: "step" }).catch(() => ({ curves: [] }));
    if (!alive()) return null;
    guess = looksLogarithmic(found.curves[0]?.steps ?? []);
  }
  return { tools, grid, begin: rebuild, drawAll, drawTools };
}

// Places of a curve in a range, and one beyond each end, so that the lines continue to the frame.
function within(curves, range) {
  if (!range) return curves;
  return curves.map((curve) => {
    const places = curve.x ?? curve.steps;
    const kept = places.map((place, index) => place !== null && (places[index + 1] ?? place) >= range[0] && (places[index - 1] ?? place) <= range[1]);
    const pick = (list) => list.filter((_, index) => kept[index]);
    return { ...curve, steps: pick(curve.steps), values: pick(curve.values), ...(curve.x ? { x: pick(curve.x) } : {}) };
  });
}

function markerPlace(curves, step) {
  if (step === null) return null;
  for (const curve of curves) {
    if (!curve.x) return Math.max(step, 0.5);
    const index = curve.steps.findIndex((one) => one >= step);
    if (index >= 0 && curve.x[index] !== null) return curve.x[index];
  }
  return null;
}

// The range in the address, or null for all.
export function shownRange(view) {
  return view.has("from") && view.has("to") && view.number("to") > view.number("from") ? [view.number("from"), view.number("to")] : null;
}

// A range as values of the address, without digits that are not seen.
export function tidyRange(ends) {
  if (!ends) return { from: null, to: null };
  const digits = Math.min(Math.max(0, Math.ceil(3 - Math.log10(Math.max(ends[1] - ends[0], 1e-12)))), 12);
  const [from, to] = ends.map((end) => Number(end.toFixed(digits)));
  return { from, to };
}

export function rangeInputs(range, zoomed) {
  const ids = [freshId("from"), freshId("to")];
  const inputs = ids.map((id, place) => el("input", { type: "number", id, step: "any", value: range ? String(range[place]) : "", placeholder: place ? "end" : "start", "data-key": place ? "range-to" : "range-from" }));
  const apply = () => {
    const [from, to] = inputs.map((input) => (input.value === "" ? null : Number(input.value)));
    if (from === null && to === null) zoomed(null);
    else if (to !== null && to > (from ?? 0)) zoomed([from ?? 0, to]);
  };
  for (const input of inputs) input.addEventListener("change", apply);
  return el(
    "span", { class: "control range" }, el("label", { for: ids[0] }, "From"), inputs[0], el("label", { for: ids[1] }, "to"), inputs[1],
    range ? el("button", { type: "button", on: { click: () => zoomed(null) } }, `Show all (now ${short(range[0])} to ${short(range[1])})`) : null,
  );
}
