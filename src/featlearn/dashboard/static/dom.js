// Elements from names and texts. Data becomes text, never HTML.

export function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (key === "on") for (const [event, react] of Object.entries(value)) node.addEventListener(event, react);
    else if (key in { value: 1, checked: 1, disabled: 1, selected: 1, htmlFor: 1 }) node[key] = value;
    else node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

export function fill(node, ...children) {
  node.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

// Replaces controls, and restores the focus on the one at the same place.
export function refill(node, ...children) {
  const controls = () => [...node.querySelectorAll("button, select, input, a")];
  const place = controls().indexOf(document.activeElement);
  fill(node, ...children);
  if (place >= 0) controls()[place]?.focus();
  return node;
}

let lastId = 0;

export function freshId(stem) {
  lastId += 1;
  return `${stem}-${lastId}`;
}

// Labeled choice. Options are texts, pairs of value and text, or {group, options}.
export function choice(label, options, chosen, react) {
  const id = freshId("choice");
  const option = (one) => {
    const [value, text] = Array.isArray(one) ? one : [one, one];
    return el("option", { value, selected: value === chosen }, text);
  };
  const select = el(
    "select",
    { id, on: { change: () => react(select.value) } },
    options.map((one) => (one.group ? el("optgroup", { label: one.group }, one.options.map(option)) : option(one))),
  );
  return el("span", { class: "control" }, el("label", { for: id }, label), select);
}

export function tick(label, checked, react) {
  const id = freshId("tick");
  const box = el("input", { type: "checkbox", id, checked, on: { change: () => react(box.checked) } });
  return el("span", { class: "control tick" }, box, el("label", { for: id }, label));
}

// The element has `adjust(count, place)`, which keeps the focus.
export function slider(label, count, place, tell, react) {
  const id = freshId("slider");
  const told = el("output", { for: id });
  const range = el("input", { type: "range", id, min: 0, step: 1 });
  const show = (now) => {
    told.textContent = tell(now);
    range.setAttribute("aria-valuetext", tell(now));
  };
  range.addEventListener("input", () => {
    show(Number(range.value));
    react(Number(range.value));
  });
  const node = el("span", { class: "control slide" }, el("label", { for: id }, label), range, told);
  node.adjust = (length, now) => {
    range.max = Math.max(length - 1, 0);
    range.disabled = length < 2;
    range.value = now;
    show(now);
  };
  node.adjust(count, place);
  return node;
}

export function note(text, kind = "soft") {
  return el("p", { class: kind }, text);
}

export function card(title, ...children) {
  return el("section", { class: "card" }, title ? el("h2", {}, title) : null, ...children);
}

export function definitions(pairs) {
  return el("dl", {}, pairs.map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
}

// Numbers with their names above them, in a row; names are texts, or pairs of a text and its tooltip.
export function numberRow(pairs) {
  const name = (one) => (Array.isArray(one) ? el("dt", { title: one[1] }, one[0]) : el("dt", {}, one));
  return el("dl", { class: "numbers" }, pairs.map(([one, value]) => el("div", {}, name(one), el("dd", {}, value))));
}
