// State of a page in its address, so that a reload, a copied address and the back button reproduce the view.

export function readAddress() {
  const [path, ...query] = location.hash.replace(/^#\/?/, "").split("?");
  return { parts: path.split("/"), query: new URLSearchParams(query.join("?")) };
}

// Values are texts, numbers, booleans or lists of texts; null, "" and false remove a name.
function withValues(query, values) {
  const next = new URLSearchParams(query);
  for (const [name, value] of Object.entries(values)) {
    next.delete(name);
    if (Array.isArray(value)) for (const one of value) next.append(name, one);
    else if (value === true) next.set(name, "1");
    else if (value !== null && value !== undefined && value !== "" && value !== false) next.set(name, String(value));
  }
  return next;
}

export function linkTo(path, values = {}) {
  const query = withValues("", values).toString();
  return `#/${path}${query ? `?${query}` : ""}`;
}

// The state of the page that is shown. `set` adds an entry to the history; `replace`, for sliders and typing, changes the
// last one, after a pause, since browsers limit how often.
export function openView(path, query) {
  let now = new URLSearchParams(query);
  let timer = 0;
  let written = location.hash;
  const write = (how) => {
    clearTimeout(timer);
    timer = 0;
    if (location.hash !== written) return; // another page is open
    const text = now.toString();
    written = `#/${path}${text ? `?${text}` : ""}`;
    if (written !== location.hash) history[how](null, "", written);
    written = location.hash;
  };
  const change = (values, how) => {
    if (how === "pushState" && timer) write("replaceState"); // the entry to which the back button returns
    now = withValues(now, values);
    if (how === "pushState") return write(how);
    clearTimeout(timer);
    timer = setTimeout(() => write(how), 200);
    return undefined;
  };
  return {
    text: (name, fallback = "") => now.get(name) ?? fallback,
    list: (name) => now.getAll(name),
    has: (name) => now.has(name),
    flag: (name, fallback = false) => (now.has(name) ? now.get(name) === "1" : fallback),
    number: (name, fallback = null) => (now.has(name) && now.get(name) !== "" && Number.isFinite(Number(now.get(name))) ? Number(now.get(name)) : fallback),
    one: (name, allowed, fallback) => (allowed.includes(now.get(name)) ? now.get(name) : fallback),
    set: (values) => change(values, "pushState"),
    replace: (values) => change(values, "replaceState"),
    link: (to, values) => linkTo(to, values),
    query: () => now.toString(),
  };
}

// The place of the step in the address among the steps that a slider has; the last one by default.
export function placeOf(steps, view) {
  const place = steps.indexOf(view.number("at"));
  return place < 0 ? steps.length - 1 : place;
}

export function keepPlace(view, steps, place) {
  view.replace({ at: place === steps.length - 1 ? null : steps[place] });
}
