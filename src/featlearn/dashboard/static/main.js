// Layout of all pages, and routing of addresses to pages.

import { readAddress } from "./address.js";
import { forgetCharts } from "./charts.js";
import { el, fill, note } from "./dom.js";
import { comparePage } from "./page_compare.js";
import { ledgerPage } from "./page_ledger.js";
import { runPage } from "./page_run.js";
import { runsPage } from "./page_runs.js";
import { sweepsPage } from "./page_sweeps.js";
import { get, isFile, isSingle } from "./source.js";
import { isDark, onTheme, startTheme, toggleTheme } from "./theme.js";

const PAGES = { runs: runsPage, run: runPage, sweeps: sweepsPage, compare: comparePage, ledger: ledgerPage };
const RETRY = 3000; // milliseconds
const TITLES_OF_PAGES = { runs: "Runs", run: "Run", sweeps: "Sweeps", compare: "Compare runs", ledger: "Ledger of claims" };
let turn = 0;

const mainPlace = el("main", { id: "main", tabindex: "-1" });
const links = {
  runs: el("a", { href: "#/runs" }, "Runs"), sweeps: el("a", { href: "#/sweeps" }, "Sweeps"), compare: el("a", { href: "#/compare" }, "Compare"), ledger: el("a", { href: "#/ledger" }, "Ledger"),
};
const light = el("button", { type: "button", class: "theme", on: { click: toggleTheme } });
const banner = el("p", { class: "banner", role: "alert", hidden: true });

function nameTheme() {
  light.textContent = isDark() ? "Light" : "Dark";
  light.setAttribute("aria-label", isDark() ? "use light colors" : "use dark colors");
}

async function show() {
  turn += 1;
  const mine = turn;
  const alive = () => mine === turn;
  forgetCharts();
  const { parts: [first, ...rest], query } = readAddress();
  const name = Object.hasOwn(PAGES, first) ? first : "runs";
  for (const [key, link] of Object.entries(links)) {
    if (key === name || (key === "runs" && name === "run")) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `${TITLES_OF_PAGES[name]}: featlearn`;
  if (!mainPlace.childElementCount) fill(mainPlace, note("Loading …"));
  try {
    const live = await PAGES[name](mainPlace, alive, rest, query);
    mainPlace.dataset.page = name;
    mainPlace.dataset.turn = String(mine);
    if (live && alive()) keepLooking(live, alive);
  } catch (error) {
    if (alive()) showError(error.message, alive);
  }
}

// The page is tried again, since a server may be started again and a run may be moved back.
function showError(message, alive) {
  if (mainPlace.querySelector(".page-error")?.textContent !== message) fill(mainPlace, el("h1", {}, "Error"), note(message, "trouble page-error"), el("p", {}, el("a", { href: "#/runs" }, "All runs")));
  const again = () => {
    if (!alive()) return;
    if (document.hidden) setTimeout(again, RETRY);
    else show();
  };
  if (!isFile) setTimeout(again, RETRY);
}

// Polls while the page is open; the interval grows with the response time.
async function keepLooking(live, alive) {
  let wait = live.every;
  while (alive()) {
    await new Promise((go) => setTimeout(go, wait));
    if (!alive()) return;
    if (document.hidden) continue;
    const began = performance.now();
    try {
      await live.refresh();
      banner.hidden = true;
    } catch (error) {
      banner.textContent = error.message;
      banner.hidden = false;
    }
    wait = Math.max(live.every, 4 * (performance.now() - began));
  }
}

async function begin() {
  startTheme();
  nameTheme();
  onTheme(nameTheme);
  fill(
    document.getElementById("app"),
    el("a", { class: "skip", href: "#main", on: { click: (event) => { event.preventDefault(); mainPlace.focus(); } } }, "Skip to content"),
    el("header", {}, el("a", { class: "brand", href: "#/runs" }, "featlearn"), el("nav", { "aria-label": "Pages" }, Object.values(links)), isFile ? el("span", { class: "soft small" }, "exported page") : null, light),
    banner, mainPlace,
  );
  if (isSingle && !location.hash) {
    const { runs } = await get("runs");
    if (runs.length) history.replaceState(null, "", `#/run/${runs[0].id}`);
  }
  window.addEventListener("hashchange", show);
  await show();
}

begin();
