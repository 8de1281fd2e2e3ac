// Values of a run by name: settings, metrics with a statistic, and facts such as its status.

import { plainValue, titleOf } from "./format.js";

export const STATISTICS = ["last", "best", "min", "max"];
const HIGHER = /acc|score|auc|(^|[^a-z])r2|f1|precision|recall|kta|nfc/i;
const HIDDEN = ["features", "kind"];

const FACTS = new Map([
  ["name", (run) => run.name], ["folder", (run) => run.path], ["status", (run) => run.status],
  ["steps", (run) => run.last_step ?? null], ["seconds", (run) => run.seconds ?? null], ["segments", (run) => run.segments ?? null],
]);

export function isHigherBetter(name) {
  return HIGHER.test(name) && !/loss|err/i.test(name);
}

// Summaries are lists of the last, the smallest and the largest value.
export function statisticOf(summary, name, statistic) {
  if (!summary) return null;
  const place = { last: 0, min: 1, max: 2, best: isHigherBetter(name) ? 2 : 1 }[statistic] ?? 0;
  return summary[place] ?? null;
}

export function statisticTitle(name, statistic) {
  return statistic === "best" ? `best (${isHigherBetter(name) ? "max" : "min"})` : statistic;
}

function namesOf(runs, key) {
  const names = new Set();
  for (const run of runs) for (const name of Object.keys(run[key] ?? {})) names.add(name);
  return [...names];
}

export function metricNames(runs) {
  return namesOf(runs, "metrics").sort();
}

// The settings, those in which runs differ first.
export function settingNames(runs) {
  const names = namesOf(runs, "settings").filter((name) => !HIDDEN.includes(name));
  const differs = new Map(names.map((name) => [name, new Set(runs.map((run) => plainValue(settingOf(run, name)))).size > 1]));
  return names.sort((a, b) => differs.get(b) - differs.get(a) || a.localeCompare(b));
}

export function settingOf(run, name) {
  return run.settings && Object.hasOwn(run.settings, name) ? run.settings[name] : null;
}

export function metricOf(run, name, statistic) {
  return run.metrics && Object.hasOwn(run.metrics, name) ? statisticOf(run.metrics[name], name, statistic) : null;
}

// A field is written f:fact, s:setting, m:statistic:metric, or l:statistic:layer:metric, with the names quoted.
export function settingField(name) {
  return `s:${encodeURIComponent(name)}`;
}

export function metricField(name, statistic) {
  return `m:${statistic}:${encodeURIComponent(name)}`;
}

export function layerField(layer, name, statistic) {
  return `l:${statistic}:${encodeURIComponent(layer)}:${encodeURIComponent(name)}`;
}

// `ofLayer(layer, name)` returns a map from runs to summaries. The answer is null for what is not a field.
export function readField(text, ofLayer = () => new Map()) {
  let parts;
  try {
    parts = text.split(":").map(decodeURIComponent);
  } catch {
    return null;
  }
  const [kind, ...rest] = parts;
  if (kind === "s" && rest.length === 1) {
    return { key: text, kind, name: rest[0], title: rest[0], value: (run) => settingOf(run, rest[0]) };
  }
  if (kind === "f" && rest.length === 1 && FACTS.has(rest[0])) {
    return { key: text, kind, name: rest[0], title: rest[0], value: FACTS.get(rest[0]) };
  }
  if (kind === "m" && rest.length === 2 && STATISTICS.includes(rest[0])) {
    const [statistic, name] = rest;
    return { key: text, kind, name, statistic, title: `${titleOf(name)}, ${statisticTitle(name, statistic)}`, value: (run) => metricOf(run, name, statistic) };
  }
  if (kind === "l" && rest.length === 3 && STATISTICS.includes(rest[0])) {
    const [statistic, layer, name] = rest;
    return {
      key: text, kind, layer, name, statistic, title: `${layer}: ${titleOf(name)}, ${statisticTitle(name, statistic)}`,
      value: (run) => statisticOf(ofLayer(layer, name).get(run.id), name, statistic),
    };
  }
  return null;
}

// The function that reads a name of a filter: a setting, a metric such as loss.min, a fact, or the end of a setting's name.
export function findField(name, runs) {
  const settings = new Set(namesOf(runs, "settings"));
  if (settings.has(name)) return (run) => settingOf(run, name);
  const metrics = new Set(namesOf(runs, "metrics"));
  if (metrics.has(name)) return (run) => metricOf(run, name, "last");
  const at = name.lastIndexOf(".");
  const statistic = name.slice(at + 1);
  if (at > 0 && STATISTICS.includes(statistic) && metrics.has(name.slice(0, at))) return (run) => metricOf(run, name.slice(0, at), statistic);
  if (FACTS.has(name)) return FACTS.get(name);
  const ends = [...settings].filter((setting) => setting.endsWith(`.${name}`));
  return ends.length === 1 ? (run) => settingOf(run, ends[0]) : null;
}
