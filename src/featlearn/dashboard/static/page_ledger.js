// Claims of the papers, and their reproductions.

import { openView } from "./address.js";
import { choice, el, fill, note, refill } from "./dom.js";
import { short } from "./format.js";
import { get } from "./source.js";
import { replaceTable, sortable } from "./tables.js";

export async function ledgerPage(main, alive, _parts, query) {
  const view = openView("ledger", query);
  const list = await get("runs");
  const found = list.ledger ? await get("ledger") : { claims: [], troubles: [] };
  if (!alive()) return null;
  if (!found.claims.length) {
    fill(
      main, el("h1", {}, "Ledger of claims"), found.troubles.map((trouble) => note(trouble, "trouble")),
      note("This folder has no ledger. Reproduce a figure to show its claims here:", ""),
      el("pre", {}, `featlearn reproduce nfa-fig1 --scale smoke --out ${/^[\w.-]+$/.test(list.folder) ? list.folder : "runs"}/reproductions`),
    );
    return null;
  }
  const place = el("div");
  const head = el("div", { class: "controls" });
  const columns = [
    { key: "experiment", title: "Experiment", value: (claim) => claim.experiment, cell: (claim) => [el("span", { title: claim.title }, claim.experiment), el("div", { class: "soft small" }, claim.scale)] },
    { key: "text", title: "Claim", wide: true, value: (claim) => claim.text, cell: (claim) => [claim.text, claim.note ? el("div", { class: "soft small" }, claim.note) : null] },
    { key: "where", title: "Source", value: (claim) => claim.where, cell: (claim) => claim.where },
    { key: "published", title: "Published", number: true, cell: (claim) => claim.published },
    { key: "measured", title: "Measured", number: true, cell: (claim) => claim.measured },
    { key: "tolerance", title: "Tolerance", number: true, value: (claim) => claim.tolerance, cell: (claim) => (claim.tolerance ? short(claim.tolerance, 2) : "–") },
    { key: "verdict", title: "Verdict", value: (claim) => claim.verdict, cell: (claim) => el("span", { class: `verdict v-${claim.verdict.split(" ")[0].replace(/[^a-z]/g, "")}` }, claim.verdict) },
  ];
  const draw = () => {
    const every = (key) => [...new Set(found.claims.map((claim) => claim[key]))];
    const chosen = Object.fromEntries(["verdict", "paper"].map((key) => [key, view.one(key, every(key), "")]));
    const order = { sort: view.text("sort"), down: view.flag("down") };
    const set = (change) => { view.set(change); draw(); };
    const shown = found.claims.filter((claim) => (!chosen.verdict || claim.verdict === chosen.verdict) && (!chosen.paper || claim.paper === chosen.paper));
    const agree = shown.filter((claim) => claim.verdict === "reproduced").length;
    refill(
      head,
      choice("Verdict", [["", "all"], ...every("verdict").map((one) => [one, one])], chosen.verdict, (verdict) => set({ verdict })),
      choice("Paper", [["", "all"], ...every("paper").map((one) => [one, one])], chosen.paper, (paper) => set({ paper })),
      el("span", { class: "soft", role: "status" }, `${shown.length} claims, ${agree} reproduced`),
    );
    replaceTable(place, shown.length ? sortable(columns, shown, order, () => set({ sort: order.sort, down: order.down })) : note("No claim matches."));
  };
  fill(main, el("h1", {}, "Ledger of claims"), note("Published values and values measured here.", "lead"), found.troubles.map((trouble) => note(trouble, "trouble")), head, place);
  draw();
  return null;
}
