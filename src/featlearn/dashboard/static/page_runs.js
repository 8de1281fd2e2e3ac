// The list of runs: filtered, sorted, grouped, with chosen columns, one part at a time.

import { openView } from "./address.js";
import { card, choice, el, fill, note, refill } from "./dom.js";
import { layerField, metricField, metricNames, readField, settingField, settingNames, STATISTICS } from "./fields.js";
import { parseFilter } from "./filter.js";
import { layerTitle, titleOf } from "./format.js";
import { groupRuns } from "./groups.js";
import { columnsOf, groupRow } from "./run_columns.js";
import { listedRuns, listFacts, readAll, readPart, searchText } from "./run_list.js";
import { getLayers, getValues, isFile } from "./source.js";
import { ordered, replaceTable, rowOf, tableOf } from "./tables.js";

const PER_PAGE = 100;
const GROUPED_BY_STATUS = "f:status";

export async function runsPage(main, alive, _parts, query) {
  const view = openView("runs", query);
  const chosen = new Set(view.list("run"));
  const values = new Map(); // values of columns of layers, by layer and name
  const fields = () => view.list("column").map((text) => readField(text, (layer, name) => values.get(JSON.stringify([layer, name])) ?? new Map())).filter(Boolean);
  const place = el("div");
  const pages = el("nav", { class: "controls pages", "aria-label": "Parts of the list" });
  const tally = el("span", { class: "soft", role: "status" });
  const wrong = el("p", { class: "trouble small", role: "alert" });
  const compare = el("a", { class: "button" });
  const tools = el("div", { class: "controls" });
  const search = el("input", { type: "search", id: "search", placeholder: "words, or lr<0.01 status=finished", value: view.text("filter"), spellcheck: "false" });
  search.addEventListener("input", () => { view.replace({ filter: search.value, page: null }); draw(); });

  const keepChosen = () => { view.replace({ run: [...chosen] }); draw(); };
  const draw = () => {
    const runs = listedRuns();
    const filter = parseFilter(view.text("filter"), runs, searchText);
    const shown = runs.filter(filter.matches);
    const order = { sort: view.text("sort", "started"), down: view.flag("down", !view.has("sort")) };
    const redraw = () => { view.set({ sort: order.sort, down: order.down ? "1" : "0", page: null }); draw(); };
    const columns = columnsOf(fields(), shown, {
      chosen, toggle: (run, on) => { chosen[on ? "add" : "delete"](run.id); keepChosen(); },
      remove: (key) => { view.set({ column: view.list("column").filter((one) => one !== key) }); draw(); drawTools(); },
    });
    tellCounts(shown, runs, filter.message);
    const group = readField(view.text("group"));
    const body = group ? groupedRows(columns, shown, group, order) : ordered(columns, shown, order).map((run) => () => rowOf(columns, run));
    const count = Math.max(Math.ceil(body.length / PER_PAGE), 1);
    const page = Math.min(Math.max(Math.round(view.number("page", 1)), 1), count);
    const part = body.slice((page - 1) * PER_PAGE, page * PER_PAGE).map((make) => make());
    replaceTable(place, shown.length ? tableOf(columns, part, order, redraw) : note(runs.length || !listFacts().loading ? "No run matches." : "Reading the runs …"));
    drawPages(page, count, body.length, group ? "rows" : "runs");
  };

  // One row per group, followed by its runs if it is open.
  const groupedRows = (columns, shown, field, order) => {
    const open = new Set(view.list("open"));
    const groups = groupRuns(shown, field.value);
    const rows = groups.map((one) => ({ ...one, row: groupRow(columns, field, one, open.has(one.key), () => {
      open[open.has(one.key) ? "delete" : "add"](one.key);
      view.set({ open: [...open] });
      draw();
    }) }));
    const column = columns.find((one) => one.key === order.sort && one.spread);
    const sorted = column ? ordered([{ key: column.key, value: (one) => one.row.means.get(column.key) }], rows, order) : rows;
    return sorted.flatMap((one) => [
      () => one.row.node(),
      ...(open.has(one.key) ? ordered(columns, one.runs, order).map((run) => () => rowOf(columns, run, { class: "member" })) : []),
    ]);
  };

  const tellCounts = (shown, runs, message) => {
    const running = runs.filter((run) => run.status === "running").length;
    const { loading } = listFacts();
    wrong.textContent = message;
    tally.textContent = [
      `${shown.length === runs.length ? runs.length : `${shown.length} of ${runs.length}`} ${runs.length === 1 ? "run" : "runs"}`,
      running ? `, ${running} running` : "", loading ? `, reading ${loading} more …` : "",
    ].join("");
    for (const id of chosen) if (!loading && !runs.some((run) => run.id === id)) chosen.delete(id);
    compare.textContent = chosen.size ? `Compare ${chosen.size} selected` : "Select runs to compare";
    compare.classList.toggle("quiet", !chosen.size);
    compare.href = chosen.size ? `#/compare?ids=${[...chosen].join(",")}` : "#/compare";
  };

  const tellReading = () => { tally.textContent = `${listedRuns().length} runs, reading ${listFacts().loading} more …`; };

  const drawPages = (page, count, total, noun) => {
    const go = (to, label, key) => el("button", { type: "button", "data-key": key, disabled: to < 1 || to > count, on: { click: () => { view.set({ page: to === 1 ? null : to }); draw(); } } }, label);
    fill(pages, count > 1 ? [
      go(page - 1, "Previous", "previous"), el("span", { class: "soft" }, `${noun} ${(page - 1) * PER_PAGE + 1} to ${Math.min(page * PER_PAGE, total)} of ${total}`), go(page + 1, "Next", "next"),
    ] : null);
  };

  let layers = {};
  const drawTools = () => {
    const runs = listedRuns();
    const settings = settingNames(runs).map((name) => [settingField(name), name]);
    const metrics = metricNames(runs);
    const statistic = view.one("statistic", STATISTICS, "last");
    const ofLayers = Object.entries(layers).map(([layer, names]) => ({ group: layerTitle(layer), options: names.map((name) => [layerField(layer, name, statistic), `${layerTitle(layer)}: ${titleOf(name)}`]) }));
    const add = async (text) => {
      if (!text) return;
      view.set({ column: [...new Set([...view.list("column"), text])] });
      await readValues();
      draw();
      drawTools();
    };
    refill(
      tools,
      choice("Add column", [["", "choose …"], { group: "Settings", options: settings }, { group: `Metrics, ${statistic}`, options: metrics.map((name) => [metricField(name, statistic), titleOf(name)]) }, ...ofLayers], "", add),
      choice("Value", STATISTICS, statistic, (one) => { view.replace({ statistic: one === "last" ? null : one }); drawTools(); }),
      choice("Group by", [["", "nothing"], [GROUPED_BY_STATUS, "status"], ...settings], view.text("group"), (text) => { view.set({ group: text, open: null, page: null }); draw(); }),
      el("button", { type: "button", on: { click: () => { for (const run of shownNow()) chosen.add(run.id); keepChosen(); } } }, "Select all"),
      el("button", { type: "button", on: { click: () => { chosen.clear(); keepChosen(); } } }, "Select none"),
      el("a", { href: view.link("sweeps", { filter: view.text("filter") }) }, "Plot as a sweep"),
    );
  };
  const shownNow = () => {
    const runs = listedRuns();
    return runs.filter(parseFilter(view.text("filter"), runs, searchText).matches).filter((run) => run.status !== "unreadable");
  };
  const readValues = async () => {
    for (const field of fields()) {
      if (field.kind === "l") values.set(JSON.stringify([field.layer, field.name]), await getValues(field.layer, field.name, listedRuns()));
    }
  };

  const title = el("h1", {});
  let empty = null;
  const show = () => {
    const { folder, loading } = listFacts();
    const none = !listedRuns().length && !loading;
    if (none !== empty) {
      empty = none;
      fill(title, none ? "No runs yet" : ["Runs ", el("span", { class: "soft" }, `in ${folder}`)]);
      fill(main, title, none ? emptyList(folder) : [
        el("div", { class: "controls" }, el("span", { class: "control grow" }, el("label", { for: "search" }, "Filter"), search), tally, compare), wrong, tools, place, pages,
      ]);
    }
    if (!none) draw();
  };
  await readPart();
  if (!alive()) return null;
  show();
  drawTools();
  const rest = async () => {
    // Meanwhile the table is drawn only now and then, and the number of runs after each part.
    let drawn = performance.now();
    if (listFacts().loading) {
      await readAll(alive, () => {
        if (listFacts().loading && performance.now() - drawn < 1500) return tellReading();
        drawn = performance.now();
        return show();
      });
    }
    if (!alive()) return;
    layers = await getLayers();
    await readValues();
    if (!alive()) return;
    show();
    drawTools();
  };
  if (isFile) await rest();
  else rest().catch((error) => { wrong.textContent = error.message; });
  return isFile ? null : {
    every: 3000,
    async refresh() {
      if (!(await readPart()) || !alive()) return;
      await readValues();
      if (!alive()) return;
      show();
      drawTools();
    },
  };
}

function emptyList(folder) {
  return card(
    null, note(`The folder “${folder}” has no runs. Add two lines to a training loop, and its run is shown here live:`, ""),
    el("pre", {}, 'monitor = featlearn.Monitor(model, (X, y), run="runs/first")\nfor step in range(1000):\n    ...\n    monitor.step(step, loss=loss)'),
    note("Or create one: featlearn demo --out demo; featlearn dashboard demo"),
  );
}
