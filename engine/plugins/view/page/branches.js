// Branches side by side, at the token where they part, and why.

import { h, inline, integer, table } from "./dom.js";
import { branchTokens, tokenStrip } from "./tokens.js";

const BEFORE = 30;
const AFTER = 90;

export async function branchesPanel(episode, params, open) {
  const branches = episode.branches;
  if (!branches.length) return h("p", { class: "empty" }, episode.finished ? "The episode has no branch." : "Branches are known when the episode has ended.");
  const rows = branches.map((each) => ({
    props: { class: Number(params.branch) === each.index ? "hit-row" : "" },
    cells: [h("button", { type: "button", class: "link", onclick: () => open({ branch: each.index, tab: "branches" }) }, `branch ${each.index}`), each.turns.join(", "), integer(each.tokens), integer(each.sampled),
      each.from < 0 ? "the first" : `branch ${each.from}, token ${integer(each.parts_at)}`, inline(each.reason, 300)],
  }));
  const overview = table(["branch", "turns", { text: "tokens", class: "number" }, { text: "sampled", class: "number" }, "parts from", "why it began"], rows, { caption: "Branches: the training rows of the episode" });
  const chosen = branches.find((each) => each.index === Number(params.branch) && each.from >= 0) || branches.find((each) => each.from >= 0);
  if (!chosen) return [overview, h("p", { class: "empty" }, "The episode has one branch: every prompt was the tokens before it and a bridge.")];
  const sides = await Promise.all([chosen.from, chosen.index].map((index) => branchTokens(episode, index)));
  const at = chosen.parts_at;
  const start = Math.max(0, at - BEFORE);
  return [
    overview,
    h("h2", {}, `Branch ${chosen.index} parts from branch ${chosen.from} at token ${integer(at)}`),
    h("p", {}, h("b", {}, "Why: "), inline(chosen.reason, 400)),
    h("div", { class: "sides" }, sides.map((tokens, side) => h("section", { "aria-label": `Branch ${side ? chosen.index : chosen.from}` },
      h("h3", {}, `Branch ${side ? chosen.index : chosen.from}`),
      ...tokenStrip(tokens, start, Math.min(tokens.ids.length, at + AFTER), "turn", { mark: at })))),
  ];
}
