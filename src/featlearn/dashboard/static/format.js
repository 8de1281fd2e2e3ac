// Formats of numbers, times and names.

export function short(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (typeof value !== "number") return String(value);
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e6) return String(value);
  if (size >= 1e-3 && size < 1e5) return size < 10 ** digits ? String(Number(value.toPrecision(digits))) : value.toFixed(0);
  return value.toExponential(1).replace(".0e", "e");
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 1) return "< 1 s";
  if (seconds < 100) return `${Math.round(seconds)} s`;
  if (seconds < 6000) return `${Math.round(seconds / 60)} min`;
  return `${short(seconds / 3600, 2)} h`;
}

export function moment(seconds) {
  if (!seconds) return "–";
  const then = new Date(seconds * 1000);
  const ago = (Date.now() - then.getTime()) / 1000;
  if (ago >= 0 && ago < 60) return "just now";
  if (ago >= 0 && ago < 3600) return `${Math.round(ago / 60)} min ago`;
  if (ago >= 0 && ago < 86400) return `${Math.round(ago / 3600)} h ago`;
  return then.toLocaleDateString(undefined, { year: "numeric", month: "short", day: "numeric" });
}

export function exactMoment(seconds) {
  return seconds ? new Date(seconds * 1000).toLocaleString() : "";
}

export function cut(text, most = 40) {
  return text.length > most ? `${text.slice(0, most - 1)}…` : text;
}

// The end of a layer's name is more specific than its beginning.
export function tail(text, most = 24) {
  return text.length > most ? `…${text.slice(1 - most)}` : text;
}

// plotly interprets some HTML in its texts, so names are escaped.
export function inert(text) {
  return String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
}

export function plainValue(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value === "number") return String(Number.isInteger(value) ? value : Number(value.toPrecision(6)));
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

const TITLES = {
  loss: "Loss", train_loss: "Training loss", test_loss: "Test loss", score: "Score", nfc: "NFC",
  centered_nfc: "Centered NFC", double_centered_nfc: "Doubly centered NFC", ptk_centered_nfc: "PTK-centered NFC",
  centered_ratio: "Share of the change in the NFC (C/UC)", fact: "FACT (cosine with WᵀW)", bfact: "Backward FACT",
  enfa: "eNFA", bagop: "Backward AGOP", benfa: "Backward eNFA", relgrad: "Relative gradient (relgrad)",
  weight_norm: "Norm of the weights", weight_change: "Weight change, |W − W₀| / |W₀|",
  weight_change_operator: "Weight change, operator norm", weight_change_two_to_infinity: "Weight change, largest row",
  alignment: "Alignment with the given directions", "w.top": "Largest eigenvalue of W",
  "w.effective_rank": "Effective rank of W", "w.stable_rank": "Stable rank of W",
  "w.initial_effective_rank": "Effective rank of W at the start", "w.edge": "Edge of W’s bulk",
  "w.spikes": "Spikes of W", "w.alpha": "Power-law exponent of W (α)", "w.bulk_distance": "Distance of W’s bulk from the start",
  "ck.kta": "Alignment of inputs and labels (KTA)", "ck.top": "Largest eigenvalue of CK",
  "ck.effective_rank": "Effective rank of CK", "ck.stable_rank": "Stable rank of CK", "ck.edge": "Edge of CK’s bulk",
  "ck.spikes": "Spikes of CK", "ck.alpha": "Power-law exponent of CK (α)",
  "ck.bulk_distance": "Distance of CK’s bulk from the start", "ntk.kta": "Alignment of NTK and labels (KTA)",
  "ntk.top": "Largest eigenvalue of the NTK", "ntk.effective_rank": "Effective rank of the NTK",
  "ntk.stable_rank": "Stable rank of the NTK", "ntk.edge": "Edge of the NTK’s bulk", "ntk.spikes": "Spikes of the NTK",
  "ntk.alpha": "Power-law exponent of the NTK (α)", "ntk.bulk_distance": "Distance of the NTK’s bulk from the start",
  "signal.gradient_norm": "Norm of the gradient", "signal.update_ratio": "Norm of the update / norm of the weights",
  "signal.dead_share": "Share of dead units", "signal.saturated_share": "Share of saturated units", "signal.activation_scale": "Scale of the outputs",
  "signal.loss_spike": "Spikes of the loss", epoch: "Epoch", "monitor.seconds": "Time of a measurement (seconds)", "monitor.share": "Measuring time / training time",
};

export function titleOf(name) {
  return Object.hasOwn(TITLES, name) ? TITLES[name] : name;
}

// Layers of a Sequential have names such as 0, 2, 4, which are not clear without a noun.
export function layerTitle(layer) {
  if (layer === null || layer === undefined || layer === "") return "model";
  return /^\d+$/.test(layer) ? `layer ${layer}` : layer;
}

export function sentence(text) {
  return text ? `${text[0].toUpperCase()}${text.slice(1)}${/[.!?]$/.test(text) ? "" : "."}` : "";
}

export function kindTitle(kind) {
  return { w: "weights W", ck: "conjugate kernel", ntk: "tangent kernel" }[kind] ?? kind;
}

const FAMILIES = [
  ["NFC", /nfc|centered_ratio/], ["FACT", /fact|enfa|bagop|relgrad/],
  ["Alignment with labels", /kta|^alignment/], ["Change of the weights", /^weight_|^moved/], ["Spectrum of W", /^w\./],
  ["Conjugate kernel", /^ck\./], ["Tangent kernel", /^ntk\./], ["Signals", /^signal\./], ["Monitor", /^monitor\./],
];

// Options of a choice of metrics, by family.
export function familyOptions(names) {
  const groups = new Map();
  for (const name of names) {
    const family = FAMILIES.find(([, rule]) => rule.test(name))?.[0] ?? "Training";
    if (!groups.has(family)) groups.set(family, []);
    groups.get(family).push([name, titleOf(name)]);
  }
  const order = ["Training", ...FAMILIES.map(([family]) => family)];
  return order.filter((family) => groups.has(family)).map((family) => ({ group: family, options: groups.get(family) }));
}

// Steps measured about eight times per decade need a logarithmic axis.
export function looksLogarithmic(steps) {
  const last = steps.at(-1) ?? 0;
  return last > 30 && steps.filter((step) => step > 0 && step <= last / 10).length > 0.4 * steps.length;
}
