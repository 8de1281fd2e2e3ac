// Sweeps: a metric against settings, and curves of groups of runs with mean and band.

import { openView } from "./address.js";
import { bandChart } from "./curve_chart.js";
import { card, choice, el, fill, note, refill, tick } from "./dom.js";
import { layerField, metricField, metricNames, readField, settingField, settingNames, STATISTICS } from "./fields.js";
import { parseFilter } from "./filter.js";
import { cut, layerTitle, looksLogarithmic, plainValue, titleOf } from "./format.js";
import { bandOf, groupRuns } from "./groups.js";
import { isLogarithmic } from "./panels.js";
import { listedRuns, listFacts, readAll, readPart, searchText } from "./run_list.js";
import { getLayers, getManyCurves, getValues, isFile } from "./source.js";
import { parallelChart, scatterChart } from "./sweep_charts.js";

const MOST_AXES = 8;
const AXIS_WIDTH = 70; // pixels
const MOST_GROUPS = 12;
const PREFERRED = ["test_loss", "val_loss", "loss", "train_loss", "score"];

export async function sweepsPage(main, alive, _parts, query) {
  const view = openView("sweeps", query);
  await readPart();
  if (!alive()) return null;
  const values = new Map();
  let layers = {};
  const runsNow = () => listedRuns().filter((run) => run.status !== "unreadable");
  const filter = () => parseFilter(view.text("filter"), runsNow(), searchText);
  const shown = () => runsNow().filter(filter().matches);
  const statistic = () => view.one("statistic", STATISTICS, "last");
  const metrics = () => metricNames(runsNow());
  const ofLayer = (layer, name) => values.get(JSON.stringify([layer, name])) ?? new Map();
  const metric = () => readField(view.text("y"), ofLayer) ?? readField(metricField(PREFERRED.find((name) => metrics().includes(name)) ?? metrics()[0] ?? "loss", statistic()), ofLayer);
  const settings = () => settingNames(shown());
  const differing = () => settings().filter((name) => new Set(shown().map((run) => plainValue(readField(settingField(name)).value(run)))).size > 1);
  // Settings with several values among the runs that have them, which are most of the runs.
  const varied = () => differing().filter((name) => 2 * held(name) >= shown().length && new Set(shown().map((run) => readField(settingField(name)).value(run)).filter((value) => value !== null).map(plainValue)).size > 1);
  const numeric = (name) => shown().some((run) => typeof readField(settingField(name)).value(run) === "number");
  // First a number that many runs have and that is not a seed.
  const held = (name) => shown().filter((run) => readField(settingField(name)).value(run) !== null).length;
  const likely = () => differing().filter((name) => numeric(name) && !/seed/.test(name)).map((name) => [name, held(name)]).sort((a, b) => b[1] - a[1])[0]?.[0];
  const across = () => view.one("x", settings(), likely() ?? differing()[0] ?? settings()[0] ?? null);
  const group = () => view.one("group", ["", ...settings()], across());
  const axes = () => {
    const listed = view.list("axis").filter((name) => settings().includes(name));
    return (listed.length ? listed : varied()).slice(0, MOST_AXES);
  };

  const head = el("div", { class: "controls" });
  const search = el("input", { type: "search", id: "sweep-filter", placeholder: "words, or optimizer=adam seed<5", value: view.text("filter"), spellcheck: "false" });
  const tally = el("span", { class: "soft", role: "status" });
  const wrong = el("p", { class: "trouble small", role: "alert" });
  const scatter = el("div", { class: "figure tall" });
  const parallel = el("div", { class: "figure tall" });
  const bands = el("div", { class: "figure tall" });
  const parallelWords = el("p", { class: "soft small", role: "status" });
  const bandWords = el("p", { class: "soft small", role: "status" });
  const scatterHead = el("div", { class: "controls" });
  const axesHead = el("div", { class: "controls" });
  const bandHead = el("div", { class: "controls" });
  let timer = 0;
  search.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(() => { view.replace({ filter: search.value }); drawAll(); }, 300);
  });
  const set = async (change) => {
    view.set(change);
    await readValues();
    await drawAll();
  };
  const readValues = async () => {
    const field = metric();
    if (field.kind === "l" && !values.has(JSON.stringify([field.layer, field.name]))) values.set(JSON.stringify([field.layer, field.name]), await getValues(field.layer, field.name, runsNow()));
  };
  const drawTools = () => {
    const chosen = metric();
    const one = statistic();
    const ofLayers = Object.entries(layers).map(([layer, names]) => ({ group: layerTitle(layer), options: names.map((name) => [layerField(layer, name, one), `${layerTitle(layer)}: ${titleOf(name)}`]) }));
    const withStatistic = (field, kind) => (field.kind === "l" ? layerField(field.layer, field.name, kind) : metricField(field.name, kind));
    refill(
      head, choice("Metric", [{ group: "Run", options: metrics().map((name) => [metricField(name, one), titleOf(name)]) }, ...ofLayers], withStatistic(chosen, one), (text) => set({ y: text })),
      choice("Value", STATISTICS, one, (kind) => set({ statistic: kind, y: withStatistic(chosen, kind) })),
    );
    const names = settings();
    refill(
      scatterHead, choice("Against", names, across(), (name) => set({ x: name, logx: null })), choice("Color", [["", "none"], ...names.map((name) => [name, name])], view.one("color", names, ""), (name) => set({ color: name })),
      tick("log setting", logX(), (on) => set({ logx: on ? "1" : "0" })), tick("log metric", logY(), (on) => set({ logy: on ? "1" : "0" })),
    );
    refill(axesHead, names.slice(0, 30).map((name) => tick(name, axes().includes(name), (on) => set({ axis: on ? [...axes(), name] : axes().filter((axis) => axis !== name) }))));
    refill(
      bandHead, choice("Group by", [["", "nothing"], ...names.map((name) => [name, name])], group() ?? "", (name) => set({ group: name || "" })),
      choice("Band", [["deviation", "standard deviation"], ["error", "standard error"], ["range", "smallest to largest"]], view.one("band", ["deviation", "error", "range"], "deviation"), (kind) => set({ band: kind })),
    );
  };
  const numbersOf = (field) => shown().map(field.value).filter((value) => typeof value === "number" && Number.isFinite(value));
  const wide = (numbers) => numbers.length > 1 && numbers.every((value) => value > 0) && numbers.reduce((a, b) => Math.max(a, b)) / numbers.reduce((a, b) => Math.min(a, b)) >= 30;
  const logX = () => view.flag("logx", across() !== null && wide(numbersOf(readField(settingField(across())))));
  const logY = () => view.flag("logy", wide(numbersOf(metric())));

  let turn = 0;
  const drawAll = async () => {
    turn += 1;
    const mine = turn;
    const current = () => alive() && mine === turn;
    const runs = shown();
    wrong.textContent = filter().message;
    const { loading } = listFacts();
    tally.textContent = `${runs.length} of ${runsNow().length} runs${loading ? `, reading ${loading} more …` : ""}`;
    drawTools();
    const field = metric();
    if (across() === null || !field || !metrics().length) {
      fill(bandWords, "These runs have no settings or no metrics: pass config={\"lr\": 0.1, ...} to featlearn.Monitor.");
      return;
    }
    const colored = view.one("color", settings(), "");
    await scatterChart(scatter, `${field.title} against ${across()}`, runs, { x: readField(settingField(across())), y: field, color: colored ? readField(settingField(colored)) : null, logX: logX(), logY: logY() });
    if (!current()) return;
    const room = Math.max(1, Math.floor((parallel.clientWidth || 600) / AXIS_WIDTH) - 1);
    parallelWords.textContent = !axes().length ? "These runs do not differ in their settings." : axes().length > room ? `The first ${room} of ${axes().length} selected settings fit on this screen.` : "";
    await parallelChart(parallel, `Settings and ${field.title}`, runs, axes().slice(0, room).map((name) => readField(settingField(name))), field);
    if (current()) await drawBands(runs, field, current);
  };
  // The curves of many runs are read in parts, and drawn after each.
  const drawBands = async (runs, field, current) => {
    const by = group() ? readField(settingField(group())) : { title: "all", value: () => "all runs" };
    const groups = groupRuns(runs, by.value);
    const kept = groups.slice(0, MOST_GROUPS);
    // Runs of all groups in turn, so that a part of them shows every group.
    const longest = Math.max(0, ...kept.map((one) => one.runs.length));
    const ids = Array.from({ length: longest }, (_, place) => kept.filter((one) => place < one.runs.length).map((one) => one.runs[place].id)).flat();
    const label = `${titleOf(field.name)} over the steps, by ${by.title}`;
    const spread = view.one("band", ["deviation", "error", "range"], "deviation");
    let drawn = 0;
    const draw = async (curves, end) => {
      if (!current() || (!end && performance.now() - drawn < 700)) return;
      const byRun = new Map();
      for (const curve of curves) byRun.set(curve.id, curve);
      const lines = kept.map((one) => ({ label: group() ? `${by.title} = ${cut(plainValue(one.value), 30)}` : "all runs", ...bandOf(one.runs.map((run) => byRun.get(run.id)).filter(Boolean), spread) })).filter((band) => band.places.length);
      bandWords.textContent = [
        end ? "" : `${byRun.size} of ${ids.length} curves …`, groups.length > MOST_GROUPS ? `The first ${MOST_GROUPS} of ${groups.length} groups are shown.` : "",
        end && byRun.size < ids.length ? `${ids.length - byRun.size} of ${ids.length} runs without this metric.` : "",
      ].join(" ").trim();
      await bandChart(bands, label, lines, { axis: "step", log: looksLogarithmic(lines[0]?.places ?? []), logValues: isLogarithmic(field.name) });
      drawn = performance.now();
    };
    const curves = await getManyCurves(ids, field.name, field.layer ?? "", { width: 400, mean: true }, (some) => { draw(some, false); return current(); });
    await draw(curves, true);
  };

  fill(
    main, el("h1", {}, "Sweeps"), el("div", { class: "controls" }, el("span", { class: "control grow" }, el("label", { for: "sweep-filter" }, "Filter"), search), tally), wrong, head,
    el("div", { class: "grid" }, card("Metric against a setting", scatterHead, scatter), card("Groups over the steps", bandHead, bands, bandWords)), card("Parallel coordinates", axesHead, parallel, parallelWords),
  );
  if (!runsNow().length && !listFacts().loading) {
    fill(main, el("h1", {}, "Sweeps"), note("There are no runs yet."));
    return null;
  }
  const rest = async () => {
    await readAll(alive);
    if (!alive()) return;
    layers = await getLayers();
    await readValues();
    if (alive()) await drawAll();
  };
  await rest();
  return isFile ? null : { every: 5000, refresh: async () => { if ((await readPart()) && alive()) await drawAll(); } };
}
