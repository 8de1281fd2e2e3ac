// One run: its tabs, updated live.

import { openView } from "./address.js";
import { card, choice, definitions, el, fill, note } from "./dom.js";
import { duration, exactMoment, moment, plainValue, short } from "./format.js";
import { statusBadge } from "./run_columns.js";
import { curvesTab } from "./tab_curves.js";
import { featuresTab } from "./tab_features.js";
import { findingsTab } from "./tab_findings.js";
import { heatTab } from "./tab_heat.js";
import { matricesTab } from "./tab_matrices.js";
import { spectraTab } from "./tab_spectra.js";
import { wordsTab } from "./tab_words.js";
import { get, isFile } from "./source.js";

const TABS = {
  features: ["Features", featuresTab], curves: ["Curves", curvesTab], map: ["Map", heatTab], words: ["Layers", wordsTab], findings: ["Findings", findingsTab],
  spectra: ["Spectra", spectraTab], matrices: ["Matrices", matricesTab], settings: ["Settings", settingsTab],
};

function tabsOf(run) {
  if (run.kind === "rfm") return ["features", "curves", "matrices", "settings"];
  return ["curves", "map", "words", "findings", "spectra", "matrices", "settings"];
}

export async function runPage(main, alive, [id, wanted], query) {
  let run = await get(`runs/${id}`);
  if (!alive()) return null;
  document.title = `${run.name}: featlearn`;
  if (run.status === "unreadable") {
    fill(main, el("h1", {}, run.name), card("This run cannot be read", note(run.message, "trouble"), note("Other runs are unaffected. If it is being copied, wait until the copy is complete.")));
    return isFile ? null : { every: 4000, refresh: async () => { if ((await get(`runs/${id}`)).status !== "unreadable" && alive()) window.dispatchEvent(new HashChangeEvent("hashchange")); } };
  }
  const names = tabsOf(run);
  const tab = names.includes(wanted) ? wanted : names[0];
  const view = openView(`run/${id}/${tab}`, query);
  const all = run.segment_list ?? [];
  const segments = all.slice(-(run.file_segments ?? all.length));
  const asked = view.number("segment");
  const segment = segments.some((one) => one.segment === asked) && asked !== all.length ? asked : null;
  if (segment) run = await get(`runs/${id}?segment=${segment}`);
  if (!alive()) return null;
  const facts = el("p", { class: "facts soft", role: "status" });
  const tell = () =>
    fill(
      facts, statusBadge(run.status), ` step ${short(run.last_step)}`, ` · ${duration(run.seconds)}`,
      el("span", { title: exactMoment(run.started) }, ` · started ${moment(run.started)}`),
      run.loss ? ` · ${run.loss.name} ${short(run.loss.value)}` : "",
    );
  const body = el("div", { class: "tab-body" });
  tell();
  document.title = `${TABS[tab][0]} of ${run.name}: featlearn`;
  fill(
    main, el("h1", {}, run.name), facts, run.message ? note(run.message, "trouble") : null, run.trouble ? note(run.trouble, "trouble") : null,
    segments.length > 1 ? segmentChoice(segments, segment, view, all.length) : null,
    segments.length < all.length ? note(`This file contains the latest ${segments.length} of ${all.length} segments.`) : null,
    el("nav", { class: "tabs", "aria-label": "Views of the run" }, names.map((name) =>
      el("a", { href: view.link(`run/${id}/${name}`, { segment }), "aria-current": name === tab ? "page" : null }, TABS[name][0]))),
    body,
  );
  const update = await TABS[tab][1](body, run, alive, view, segment);
  let version = run.version;
  return isFile ? null : {
    every: 1500,
    async refresh() {
      const now = await get(`runs/${id}/changes?after=${version}`);
      if (!now.changed || !alive()) return;
      run = await get(`runs/${id}${segment ? `?segment=${segment}` : ""}`);
      if (!alive() || run.status === "unreadable") return;
      version = run.version;
      tell();
      if (update) await update(run);
    },
  };
}

// Segments begin where the steps of a training go back; the latest one is shown first.
function segmentChoice(segments, segment, view, latest) {
  const options = segments.map((one) => [String(one.segment), `${one.segment}: steps ${one.first} to ${one.last ?? "–"}${one.segment === latest ? " (latest)" : ""}`]);
  const select = (value) => {
    view.set({ segment: Number(value) === latest ? null : value });
    window.dispatchEvent(new HashChangeEvent("hashchange"));
  };
  return el("div", { class: "controls" }, choice("Segment", options.reverse(), String(segment ?? latest), select));
}

async function settingsTab(body, run) {
  const pairs = (found) => definitions(Object.entries(found ?? {}).map(([name, value]) => [name, plainValue(value)]));
  const listed = Object.keys(run.settings ?? {}).length ? pairs(run.settings) : note("This run has no settings. Pass config={\"lr\": 0.1, ...} to featlearn.Monitor to show them here and to distinguish runs.");
  fill(body, el("div", { class: "grid" }, card("Settings", listed), card("Environment", pairs(run.environment))));
  return null;
}
