// Rewards: a timeline of the turns with transfers drawn from turn to turn, and the table of who wrote and moved what.

import { h, inline, signed, svg, table, tone } from "./dom.js";

export function finalReward(outcome, kind = "") {
  // The reward of an episode. That of a failed or untrainable one counts for nothing, so it has no colour.
  const counts = outcome.trainable && !outcome.failure;
  return h("span", { class: `reward ${kind} ${counts ? tone(outcome.reward) : "none"}`, title: counts ? null : "It is not trained on" }, signed(outcome.reward));
}

const COLUMN = 64;
const HEIGHT = 46;
const ARC = 26;

function held(turn) {
  return Object.values(turn.rewards).reduce((sum, value) => sum + value, 0);
}

function arc(x1, x2, base, rise, move, number, open) {
  const path = `M${x1} ${base} C${x1} ${base - rise} ${x2} ${base - rise} ${x2} ${base - 3}`;
  const label = `${move.names.join(", ")} ${move.amount.toFixed(3)}`;
  return svg("g", { class: "transfer", "data-move": number },
    svg("path", { d: path, class: "arc", "marker-end": "url(#arrow)" }),
    svg("text", { x: (x1 + x2) / 2, y: base - rise * 0.75 - 4, "text-anchor": "middle" }, label),
    svg("title", {}, `${label} moved from turn ${move.from.join(", ")} to turn ${move.to.join(", ")}, after turn ${move.at_turn}, by ${move.source}: ${move.cause}`));
}

function timeline(episode, selected, open) {
  const turns = episode.turns;
  const values = turns.map(held);
  const most = Math.max(1e-9, ...values.map(Math.abs));
  const transfers = episode.moves.map((move, number) => ({ move, number })).filter(({ move }) => move.op === "transfer" && move.from.length && move.to.length);
  const spans = transfers.flatMap(({ move }) => move.from.flatMap((from) => move.to.map((to) => Math.abs(from - to))));
  const rise = (distance) => ARC + 14 * Math.min(8, distance);
  const above = (spans.length ? Math.max(...spans.map(rise)) + 8 : 0) + 16;
  const up = values.some((value) => value > 0) ? HEIGHT : 4;
  const down = values.some((value) => value < 0) ? HEIGHT : 4;
  const top = above + 18;
  const base = top + up;
  const width = Math.max(1, turns.length) * COLUMN;
  const x = (turn) => turn * COLUMN + COLUMN / 2;
  const bars = turns.map((turn, at) => {
    const value = values[at];
    const size = (Math.abs(value) / most) * HEIGHT;
    return svg("g", { class: "turn-bar" + (selected === turn.index ? " selected" : ""), role: "button", tabindex: "0",
      "aria-label": `turn ${turn.index}: ${signed(value)}`, onclick: () => open({ turn: turn.index }),
      onkeydown: (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); open({ turn: turn.index }); } } },
      svg("rect", { class: "hit", x: at * COLUMN, y: 0, width: COLUMN, height: base + down + 34 }),
      svg("rect", { class: "bar " + tone(value), x: x(at) - 14, y: value >= 0 ? base - size : base, width: 28, height: Math.max(1, size), rx: 2 }),
      svg("text", { x: x(at), y: value >= 0 ? base - size - 5 : base + size + 13, "text-anchor": "middle", class: "value" }, value ? signed(value, 2) : "0"),
      svg("text", { x: x(at), y: base + down + 26, "text-anchor": "middle", class: "axis" }, `turn ${turn.index}`),
      svg("title", {}, Object.entries(turn.rewards).map(([name, each]) => `${name} ${signed(each)}`).join("\n") || "no reward"));
  });
  const offset = top - 20;
  const arcs = transfers.flatMap(({ move, number }) => move.from.flatMap((from) => move.to.map((to) =>
    arc(x(from) + (to < from ? -6 : 6), x(to) + (to < from ? 6 : -6), offset, rise(Math.abs(from - to)), move, number, open))));
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Timeline of rewards" },
    svg("svg", { class: "timeline", viewBox: `0 0 ${width} ${base + down + 34}`, width, height: base + down + 34, role: "group",
      "aria-label": "Rewards by turn. The table below has every change." },
    svg("defs", {}, svg("marker", { id: "arrow", viewBox: "0 0 8 8", refX: 6, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto-start-reverse" },
      svg("path", { d: "M0 0 L8 4 L0 8 Z", class: "arrow" }))),
    svg("line", { x1: 0, x2: width, y1: base, y2: base, class: "base" }), bars, arcs));
}

function did(move) {
  const names = move.names.join(", ");
  if (move.op === "transfer") return `${names} ${move.amount.toFixed(3)}: turn ${move.from.join(", ")} → turn ${move.to.join(", ")}`;
  return move.op === "set" ? `${names} set on turn ${move.to.join(", ")}` : `${names} on turn ${move.to.join(", ")}`;
}

export function rewardsPanel(episode, params, open) {
  if (!episode.finished) return h("p", { class: "empty" }, "Rewards are known when the episode has ended.");
  const touches = (move) => params.turn === null || move.from.includes(params.turn) || move.to.includes(params.turn);
  const rows = episode.moves.map((move, number) => ({
    props: { class: (move.op === "transfer" ? "transfer-row " : "") + (params.turn !== null && touches(move) ? "hit-row" : ""), "data-move": number,
      onmouseenter: () => light(number, true), onmouseleave: () => light(number, false) },
    cells: [String(move.at_turn), move.op, did(move), h("span", { class: tone(move.amount) }, signed(move.amount)), inline(move.source, 40), inline(move.cause, 200)],
  }));
  const light = (number, on) => { for (const each of document.querySelectorAll(`.transfer[data-move="${number}"]`)) each.classList.toggle("lit", on); };
  const names = [...new Set(episode.turns.flatMap((turn) => Object.keys(turn.rewards)))];
  const held_ = episode.turns.map((turn) => ({
    props: { class: turn.index === params.turn ? "hit-row" : "" },
    cells: [`turn ${turn.index}`, ...names.map((name) => (name in turn.rewards ? h("span", { class: tone(turn.rewards[name]) }, signed(turn.rewards[name])) : "")),
      h("b", {}, signed(held(turn))), turn.advantage === null ? "" : h("span", { class: tone(turn.advantage) }, signed(turn.advantage))],
  }));
  return [
    episode.turns.length ? timeline(episode, params.turn, open) : null,
    params.turn !== null ? h("p", { class: "dim" }, `Changes of turn ${params.turn} are marked.`) : null,
    rows.length ? table(["after turn", "did", "what", { text: "amount", class: "number" }, "by", "cause"], rows, { caption: "Who wrote and moved which reward" })
      : h("p", { class: "empty" }, "No reward was written."),
    episode.turns.length ? table(["turn", ...names.map((text) => ({ text, class: "number" })), { text: "sum", class: "number" }, { text: "advantage", class: "number" }], held_,
      { caption: "What each turn holds at the end", rowheads: true }) : null,
    h("p", { class: "dim" }, episode.credit.method ? `Credit: ${episode.credit.method}. ` : "", episode.credit.missing ? `No advantages: ${episode.credit.missing}.` : episode.outcome.trainable ? "" : "No advantages: the episode is not trainable."),
  ];
}
