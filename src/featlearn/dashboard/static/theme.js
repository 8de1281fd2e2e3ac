// Light or dark theme, from the system or chosen here.

const KEY = "featlearn-theme";
const system = window.matchMedia("(prefers-color-scheme: dark)");
const listeners = new Set();

function kept() {
  try {
    return localStorage.getItem(KEY);
  } catch {
    return null; // a page opened as a file may have no storage
  }
}

export function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : system.matches;
}

export function onTheme(react) {
  listeners.add(react);
}

function tellTheme() {
  for (const react of listeners) react();
}

export function startTheme() {
  if (["light", "dark"].includes(kept())) document.documentElement.dataset.theme = kept();
  system.addEventListener("change", tellTheme);
}

export function toggleTheme() {
  const next = isDark() ? "light" : "dark";
  document.documentElement.dataset.theme = next;
  try {
    localStorage.setItem(KEY, next);
  } catch {
    // the choice then applies to this page only
  }
  tellTheme();
}
