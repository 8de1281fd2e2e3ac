// Source of the data: the server, or the page itself if it is an exported file.

const heldElement = document.getElementById("held");
const held = heldElement ? JSON.parse(heldElement.textContent) : null;

export const isFile = held !== null;
export const isSingle = held !== null && held.single;

export function quoted(text) {
  return encodeURIComponent(text);
}

async function fromServer(address) {
  let answer;
  try {
    answer = await fetch(`/api/${address}`, { headers: { accept: "application/json" } });
  } catch {
    throw new Error("The server does not respond. Check that `featlearn dashboard` is running.");
  }
  const content = await answer.json().catch(() => ({ error: `The server responded with status ${answer.status}.` }));
  if (!answer.ok) throw new Error(content.error ?? `The server responded with status ${answer.status}.`);
  return content;
}

function fromFile(address) {
  if (!Object.hasOwn(held.answers, address)) throw new Error("The file does not contain this. Open the runs with `featlearn dashboard`.");
  const content = held.answers[address];
  if (content.error) throw new Error(content.error);
  return content;
}

export async function get(address) {
  return isFile ? fromFile(address) : fromServer(address);
}

export async function getSeries(id, name, { layer, width = 800, from, to, log } = {}) {
  if (isFile) {
    const found = fromFile(`runs/${id}/series?name=${quoted(name)}`);
    return layer === undefined ? found : { ...found, curves: found.curves.filter((c) => (c.layer ?? "") === layer) };
  }
  let query = `name=${quoted(name)}&width=${Math.round(Math.min(Math.max(width, 100), 4000))}`;
  if (layer !== undefined) query += `&layer=${quoted(layer)}`;
  if (from !== undefined) query += `&from=${Math.max(0, Math.floor(from))}&to=${Math.max(0, Math.ceil(to))}`;
  if (log) query += "&log=1";
  return fromServer(`runs/${id}/series?${query}`);
}

export async function getMatrix(id, step, name) {
  return get(`runs/${id}/matrices/${step}/${quoted(name)}`);
}

export async function getSpectrum(id, step, layer, kind) {
  return get(`runs/${id}/spectra/${step}?layer=${quoted(layer ?? "")}&kind=${quoted(kind)}`);
}

export async function getComparison(ids, name, layer) {
  if (!isFile) {
    const asked = name ? `&name=${quoted(name)}&layer=${quoted(layer)}` : "";
    return fromServer(`compare?ids=${ids.join(",")}${asked}`);
  }
  const runs = ids.map((id) => fromFile(`runs/${id}`));
  const curves = [];
  for (const id of name ? ids : []) {
    const found = held.answers[`runs/${id}/series?name=${quoted(name)}`];
    for (const curve of found ? found.curves : []) if ((curve.layer ?? "") === layer) curves.push({ ...curve, id });
  }
  const names = new Set(runs.flatMap((run) => Object.keys(run.settings ?? {})));
  const settings = [...names]
    .map((setting) => ({ setting, values: Object.fromEntries(runs.map((run) => [run.id, run.settings?.[setting] ?? null])) }))
    .filter(({ values }) => new Set(Object.values(values).map((value) => JSON.stringify(value))).size > 1);
  return { runs, settings, curves };
}
