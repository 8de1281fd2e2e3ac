// Rows of all runs, kept between pages: the server sends them in parts, and later only those that have changed.

import { get, isFile } from "./source.js";

const rows = new Map();
const facts = { folder: "", ledger: false, version: "", loading: 0 };

// Reads one part and returns whether anything has changed.
export async function readPart() {
  const part = await get(isFile || !facts.version ? "runs" : `runs?after=${facts.version}`);
  const before = rows.size;
  if (part.complete) {
    const kept = new Set(part.runs.map((run) => run.id));
    for (const id of [...rows.keys()]) if (!kept.has(id)) rows.delete(id);
  }
  for (const run of part.runs) rows.set(run.id, run);
  Object.assign(facts, { folder: part.folder, ledger: part.ledger, version: part.version, loading: part.loading });
  return part.runs.length > 0 || rows.size !== before;
}

export function listFacts() {
  return facts;
}

// The newest first.
export function listedRuns() {
  return [...rows.values()].sort((a, b) => (b.started ?? 0) - (a.started ?? 0) || a.path.localeCompare(b.path));
}

// Reads until all rows are there; `react` is called after each part.
export async function readAll(alive, react = () => {}) {
  do {
    await readPart();
    if (!alive()) return;
    await react();
  } while (facts.loading && alive());
}

// Text of a run in which words are searched.
export function searchText(run) {
  const settings = Object.entries(run.settings ?? {}).map(([name, value]) => `${name} ${typeof value === "object" ? JSON.stringify(value) : value}`);
  return [run.name, run.path, run.status, run.kind ?? "", ...settings, ...Object.keys(run.readings ?? {})].join(" ").toLowerCase();
}
