// Filter expressions such as `lr<0.01 optimizer=adam status=finished`; other words are searched in the text of a run.

import { findField } from "./fields.js";
import { plainValue } from "./format.js";

const TOKEN = /([^\s<>=!"]+)\s*(<=|>=|!=|==?|<|>)\s*(?:"([^"]*)"|([^\s"]+))|"([^"]*)"|([^\s"]+)/g;

// The answer has `matches(run)`, and a message for a name that no run has.
export function parseFilter(text, runs, textOf) {
  const words = [];
  const rules = [];
  const unknown = [];
  for (const [, name, sign, quotedValue, value, quotedWord, word] of text.matchAll(TOKEN)) {
    if (name === undefined) {
      words.push((quotedWord ?? word).toLowerCase());
      continue;
    }
    const read = findField(name, runs);
    if (read) rules.push({ read, test: testOf(sign, quotedValue ?? value) });
    else unknown.push(name);
  }
  return {
    message: unknown.length ? `No run has the setting or metric “${unknown.join("”, “")}”.` : "",
    matches: (run) => !unknown.length && rules.every(({ read, test }) => test(read(run))) && (!words.length || allIn(words, textOf(run))),
  };
}

function allIn(words, text) {
  return words.every((word) => text.includes(word));
}

function testOf(sign, wanted) {
  const number = wanted.trim() === "" ? NaN : Number(wanted);
  if (sign === "<" || sign === ">" || sign === "<=" || sign === ">=") {
    return (value) => {
      if (typeof value !== "number" || Number.isNaN(number)) return false;
      if (sign === "<") return value < number;
      if (sign === ">") return value > number;
      return sign === "<=" ? value <= number : value >= number;
    };
  }
  const glob = wanted.toLowerCase();
  const equals = (value) => {
    if (value === null || value === undefined) return ["", "none", "null"].includes(wanted.toLowerCase());
    if (typeof value === "number" && !Number.isNaN(number)) return value === number;
    return matchesGlob(glob, plainValue(value).toLowerCase());
  };
  return sign === "!=" ? (value) => !equals(value) : equals;
}

// Whether a text matches a glob pattern: * is any text, ? one character. A regular expression could take forever.
export function matchesGlob(glob, text) {
  let [at, place, star, from] = [0, 0, -1, 0];
  while (place < text.length) {
    if (at < glob.length && (glob[at] === "?" || (glob[at] === text[place] && glob[at] !== "*"))) {
      at += 1;
      place += 1;
    } else if (glob[at] === "*") {
      star = at;
      from = place;
      at += 1;
    } else if (star >= 0) {
      at = star + 1;
      from += 1;
      place = from;
    } else return false;
  }
  while (glob[at] === "*") at += 1;
  return at === glob.length;
}

// Whether a layer matches one of some patterns, which are separated by spaces.
export function matchesLayers(globs, layer) {
  const some = globs.split(/\s+/).filter(Boolean);
  return !some.length || some.some((glob) => matchesGlob(glob, layer));
}
