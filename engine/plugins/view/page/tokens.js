// Tokens of a branch, coloured by log-prob, loss mask, advantage, weight version or turn. The exact values of a token are shown
// when the pointer is on it or it has the focus.

import { announce, button, h, integer, shown, signed } from "./dom.js";
import { get } from "./data.js";

const MODES = { advantage: "advantage", logprob: "log-prob", mask: "loss mask", version: "weight version", turn: "turn" };
const MOST_TOKENS = 6000;
const BEFORE_NAMED = 300;
const HUES = [212, 28, 150, 280, 50, 340, 185, 95];
const cache = new Map();

export async function branchTokens(episode, branch) {
  const key = [episode.run_key, episode.episode, episode.finished, episode.path.length, branch].join("\n");
  if (!cache.has(key)) {
    if (cache.size > 24) cache.clear();
    cache.set(key, get("tokens", { run: episode.run_key, id: episode.episode, branch }));
  }
  try {
    return await cache.get(key);
  } catch (error) {
    cache.delete(key);
    throw error;
  }
}

function colour(tokens, mode, scale) {
  // A function of the token's position: [hue, strength from 0 to 1], or null for none.
  if (mode === "mask") return (at) => (tokens.mask[at] ? [212, 0.75] : null);
  if (mode === "logprob") return (at) => (tokens.mask[at] && tokens.logprobs[at] !== null ? [18, 1 - Math.exp(tokens.logprobs[at])] : null);
  if (mode === "advantage") {
    return (at) => {
      const value = tokens.advantages?.[at];
      if (!tokens.mask[at] || value === null || value === undefined) return null;
      return [value >= 0 ? 145 : 2, scale ? 0.12 + 0.88 * Math.abs(value) / scale : 0.12];
    };
  }
  const values = mode === "version" ? tokens.versions : tokens.turns;
  return (at) => (values[at] >= 0 ? [HUES[values[at] % HUES.length], 0.7] : null);
}

export async function firstTrained(episode) {
  // The place of the first token that is trained: the first sampled one of a branch that is a training row. null: there is none.
  for (const { index, sampled } of episode.branches) {
    if (!sampled) continue;
    const tokens = await branchTokens(episode, index);
    const at = tokens.mask.indexOf(1);
    if (tokens.trainable && at >= 0) return { branch: index, turn: tokens.turns[at], token: at };
  }
  return null;
}

export function tokenText(tokens, at) {
  if (!tokens.texts) return `${tokens.ids[at]} `;
  return tokens.texts[at];
}

function facts(tokens, at, origin) {
  const value = (array, digits) => (array?.[at] === null || array?.[at] === undefined ? "–" : digits === undefined ? String(array[at]) : signed(array[at], digits));
  const sampled = tokens.mask[at] === 1;
  const kind = tokens.kinds.find(([, start, end]) => at >= start && at < end)?.[0] || "";
  const probability = sampled && tokens.logprobs[at] !== null ? ` (p ${Math.exp(tokens.logprobs[at]).toPrecision(3)})` : "";
  return [
    ["token", tokens.texts ? JSON.stringify(tokens.texts[at]) : "(no tokenizer)"],
    ["id", String(tokens.ids[at])],
    ["position", `${at}${origin !== null && at >= origin ? `, ${at - origin} in the turn` : ""}`],
    ["kind", kind],
    ["loss mask", String(tokens.mask[at])],
    ["log-prob", sampled ? value(tokens.logprobs) + probability : "–"],
    ["advantage", sampled ? value(tokens.advantages) : "–"],
    ["reward", value(tokens.token_rewards)],
    ["version", sampled ? String(tokens.versions[at]) : "–"],
    ["turn", tokens.turns[at] >= 0 ? String(tokens.turns[at]) : "–"],
  ];
}

export function tokenStrip(tokens, start, end, mode, options = {}) {
  // Tokens [start, end) as spans, with a line below that shows the values of one.
  const trained = tokens.advantages ? tokens.advantages.filter((value, at) => tokens.mask[at] && value !== null).map(Math.abs) : [];
  const paint = colour(tokens, mode, trained.length ? trained.reduce((a, b) => Math.max(a, b), 0) : 0);
  const details = h("dl", { class: "token-values", "aria-live": "polite" });
  const strip = h("div", { class: "tokens", role: "listbox", "aria-label": `Tokens ${start} to ${end}, coloured by ${MODES[mode]}`, tabindex: "-1" });
  let chosen = null;
  const choose = (span) => {
    if (!span) return;
    chosen?.setAttribute("tabindex", "-1");
    chosen?.setAttribute("aria-selected", "false");
    chosen = span;
    span.setAttribute("tabindex", "0");
    span.setAttribute("aria-selected", "true");
    const at = Number(span.dataset.at);
    details.replaceChildren(...facts(tokens, at, options.origin ?? null).flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, shown(value))]));
  };
  const add = (from, to) => {
    const spans = [];
    for (let at = from; at < to; at += 1) {
      const text = tokenText(tokens, at);
      const part = paint(at);
      const span = h("span", { class: "token" + (tokens.mask[at] ? " sampled" : "") + (at === options.mark ? " parting" : ""), "data-at": at, role: "option", tabindex: "-1", "aria-selected": "false",
        "aria-label": text.trim() ? null : JSON.stringify(text) });
      if (part) { span.style.setProperty("--hue", part[0]); span.style.setProperty("--strength", part[1].toFixed(3)); span.classList.add("coloured"); }
      const lines = text.split("\n");
      lines.forEach((line, number) => {
        if (number) span.append(h("span", { class: "newline", "aria-hidden": "true" }, "⏎"), "\n");
        if (line) span.append(shown(line));
      });
      if (!text) span.append(h("span", { class: "newline" }, "·"));
      spans.push(span);
    }
    strip.append(...spans);
  };
  const first = Math.min(end, start + MOST_TOKENS);
  add(start, first);
  const more = first < end ? button(`Show ${integer(end - first)} more tokens`, () => { add(first, end); more.remove(); }, { class: "more" }) : null;
  strip.addEventListener("pointerover", (event) => choose(event.target.closest(".token")));
  strip.addEventListener("click", (event) => event.target.closest(".token")?.focus());
  strip.addEventListener("focusin", (event) => choose(event.target.closest(".token")));
  strip.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 }[event.key];
    if (!by || !chosen) return;
    event.preventDefault();
    event.stopPropagation();
    const spans = strip.children;
    const next = spans[Math.max(0, Math.min(spans.length - 1, [...spans].indexOf(chosen) + by))];
    next.focus();
  });
  choose(strip.querySelector(`[data-at="${options.chosen}"]`) || strip.querySelector(".parting") || strip.firstElementChild);
  requestAnimationFrame(() => chosen && options.chosen !== undefined && chosen.scrollIntoView({ block: "nearest" }));
  return [strip, more, details];
}

function legend(tokens, mode) {
  const swatch = (hue, strength, text) => h("li", {}, h("span", { class: "token coloured swatch", style: { "--hue": hue, "--strength": strength } }, " "), text);
  if (mode === "mask") return [swatch(212, 0.75, "trained (1)"), h("li", {}, "plain: not sampled (0)")];
  if (mode === "logprob") return [swatch(18, 0.05, "p near 1"), swatch(18, 0.5, "p 0.5"), swatch(18, 1, "p near 0")];
  if (mode === "advantage") return [swatch(145, 0.8, "above 0"), swatch(2, 0.8, "below 0"), h("li", {}, "stronger: larger")];
  const values = [...new Set(mode === "version" ? tokens.versions : tokens.turns)].filter((each) => each >= 0);
  return values.slice(0, 12).map((each) => swatch(HUES[each % HUES.length], 0.7, `${MODES[mode]} ${each}`));
}

export async function tokensPanel(episode, params, open) {
  const turn = params.turn === null ? null : episode.turns[params.turn];
  if (episode.finished && !episode.branches.some((each) => each.tokens)) return h("p", { class: "empty" }, "The backend gave no token ids.");
  const branch = params.branch !== undefined ? Number(params.branch) : turn ? turn.branch : episode.finished ? 0 : -1;
  const tokens = await branchTokens(episode, branch);
  const mode = params.color in MODES ? params.color : tokens.advantages ? "advantage" : "logprob";
  const own = turn && turn.branch === branch;
  const scope = own ? params.scope || "turn" : "branch";
  let [start, end] = [0, tokens.ids.length];
  if (scope === "turn") [start, end] = range(tokens, turn);
  if (scope === "seen") end = range(tokens, turn)[0];
  const named = params.token === undefined ? undefined : Number(params.token);
  if (named >= start + MOST_TOKENS) start = named - BEFORE_NAMED;
  const trained = tokens.mask.slice(start, end).reduce((sum, each) => sum + each, 0);
  const choice = (name, label, options, value, change) => h("label", { class: "choice" }, `${label} `,
    h("select", { name, onchange: (event) => change(event.target.value) }, options.map(([key, text]) => h("option", { value: key, selected: String(key) === String(value) }, text))));
  const scopes = own ? [["turn", `turn ${turn.index}`], ["seen", `what turn ${turn.index} saw`], ["branch", "the whole branch"]] : [["branch", "the whole branch"]];
  return [
    h("div", { class: "choices" },
      h("fieldset", { class: "modes" }, h("legend", {}, "Colour by"), Object.entries(MODES).map(([key, text]) => h("label", {},
        h("input", { type: "radio", name: "color", value: key, checked: key === mode, onchange: () => open({ color: key }) }), text))),
      choice("scope", "Tokens of", scopes, scope, (value) => open({ scope: value })),
      episode.branches.length > 1 ? choice("branch", "Branch", episode.branches.map((each) => [each.index, `${each.index} (${integer(each.tokens)} tokens)`]), branch, (value) => open({ branch: value, scope: "branch" })) : null),
    h("ul", { class: "legend" }, legend(tokens, mode)),
    h("p", { class: "dim" }, `${integer(end - start)} tokens, ${integer(trained)} of them sampled`,
      tokens.trainable ? " and trained. " : ", none trained. ", tokens.missing ? `No advantages: ${tokens.missing}. ` : "",
      tokens.problem ? `No texts: ${tokens.problem}` : ""),
    ...tokenStrip(tokens, start, end, mode, { origin: own ? range(tokens, turn)[0] : null, chosen: named }),
  ];
}

function range(tokens, turn) {
  // The first and one past the last sampled token of a turn in its branch.
  const first = tokens.turns.indexOf(turn.index);
  return first < 0 ? [0, 0] : [first, tokens.turns.lastIndexOf(turn.index) + 1];
}
