// The transcript: messages with images in place, tool calls and results, and what happened between them.

import { button, h, inline, integer, many, prose, reward, seconds, shown, signed, tone, valueText } from "./dom.js";
import { imageAddress } from "./data.js";

const GOLD = ["answer", "ground_truth", "label", "solution", "gold", "target", "expected"];

export function goldField(fields) {
  // The name of the field that most likely holds the right answer; null if there is none.
  return GOLD.find((name) => name in fields) ?? null;
}

function image(run, part) {
  const size = part.width ? `${part.width}×${part.height}` : "";
  const from = imageAddress(run, part.image);
  if (!from) return h("span", { class: "missing" }, `[image ${part.image.slice(0, 19)}… ${size}: not in this file]`);
  return h("a", { href: from, target: "_blank", rel: "noopener" },
    h("img", { src: from, alt: `Image ${size}`, title: `${part.image} ${size}`, loading: "lazy", width: part.width, height: part.height }));
}

export function content(run, message) {
  // The parts of a message, in order.
  return [
    message.reasoning ? h("details", { class: "reasoning", open: true }, h("summary", {}, "reasoning"), prose(message.reasoning.trimEnd())) : null,
    message.parts.map((part) => ("image" in part ? image(run, part) : part.text.trim() ? prose(part.text) : null)),
    message.calls.map((call) => h("div", { class: "call" },
      h("span", { class: "call-name" }, h("bdi", {}, shown(call.name))),
      h("dl", {}, Object.entries(call.arguments).map(([name, value]) => [
        h("dt", {}, h("bdi", {}, shown(name))), h("dd", {}, prose(valueText(value)))])))),
  ];
}

export function who(message) {
  return message.role === "tool" && message.name ? ["tool ", h("bdi", {}, shown(message.name))] : message.role;
}

function block(run, message, extra = null) {
  return h("article", { class: "message " + message.role, "aria-label": message.role },
    h("header", {}, h("span", { class: "role" }, who(message)),
      message.error ? h("span", { class: "badge bad" }, message.error) : null,
      message.seconds !== undefined ? h("span", { class: "dim" }, seconds(message.seconds)) : null, extra),
    content(run, message));
}

function marked(step, mark) {
  return [`${mark.source || "score"} marked turn ${mark.turn === "last" ? step.turn : mark.turn}: `,
    reward(mark.value, mark.name || "reward"), mark.cause ? [" · ", inline(mark.cause, 400)] : ""];
}

function judged(step) {
  // What a judge said about each turn, with its mark.
  return step.judge.map(({ text, mark }) => h("article", { class: "message judge", "aria-label": "judge" },
    h("header", {}, h("span", { class: "role" }, "judge"), mark ? h("span", { class: "mark" }, marked(step, mark)) : null),
    prose(text)));
}

function notes(steps) {
  // What steps say that is in no message.
  return steps.flatMap((step) => {
    if (step.kind === "user" && (step.solved || step.satisfied || step.recover || step.canned)) {
      const said = [step.solved && "solved", step.satisfied && "satisfied", step.recover && `problem: ${step.recover}`, step.canned && "answered by the engine"];
      return [h("p", { class: "step-note" + (step.solved ? " good" : "") }, `user: ${said.filter(Boolean).join(", ")}`)];
    }
    if (step.kind === "score") return [...step.marks.map((mark) => h("p", { class: "step-note mark" }, marked(step, mark))), ...judged(step)];
    if (step.kind === "limit") return [h("p", { class: "step-note warn" }, `limit ${step.limit} reached: ${step.value}`)];
    if (step.kind === "condense") return [h("p", { class: "step-note" }, `condensed: ${integer(step.before)} → ${integer(step.after)} tokens`)];
    if (step.kind === "failure") return [h("p", { class: "step-note bad" }, `${step.failure.kind} (${step.failure.blame}): `, inline(step.failure.message, 400))];
    return [];
  });
}

function moved(moves) {
  return moves.map((move) => h("p", { class: "step-note move" }, "⇄ ",
    `${move.names.join(", ")} ${move.amount.toFixed(3)} from turn ${move.from.join(", ")} to turn ${move.to.join(", ")}`,
    ` · ${move.source}`, move.cause ? [": ", inline(move.cause, 300)] : ""));
}

export function taskCard(episode) {
  const fields = episode.task.fields;
  const gold = goldField(fields);
  const rest = Object.entries(fields).filter(([name]) => name !== gold);
  return h("details", { class: "task" },
    h("summary", {}, "Task ", h("b", {}, inline(episode.task.id, 60)),
      gold ? [h("span", { class: "dim" }, ` · ${gold}: `), h("span", { class: "gold" }, inline(valueText(fields[gold]), 90))] : null),
    h("dl", { class: "fields" },
      gold ? [h("dt", {}, gold, h("span", { class: "dim" }, " (right answer)")), h("dd", {}, prose(valueText(fields[gold]), "gold"))] : null,
      rest.map(([name, value]) => [h("dt", {}, h("bdi", {}, shown(name))), h("dd", {}, prose(valueText(value)))])));
}

export function turnHead(turn, open) {
  // The line above a reply: turn, tokens, event, rewards and advantage; each part opens the panel that explains it.
  const rewards = Object.entries(turn.rewards);
  return h("header", { class: "turn-head" },
    button(`Turn ${turn.index}`, () => open({ turn: turn.index }), { class: "turn-name" }),
    button(many(turn.tokens, "token"), () => open({ turn: turn.index, tab: "tokens" }), { class: "chip", title: "Tokens of this turn" }),
    button("seen", () => open({ turn: turn.index, tab: "seen" }), { class: "chip", title: "What the model saw at this turn" }),
    h("span", { class: "dim" }, `${turn.event} · ${seconds(turn.seconds)}`),
    turn.unreceived ? h("span", { class: "dim" }, "nobody received it, so it is not trained") : null,
    h("span", { class: "grow" }),
    rewards.length ? rewards.map(([name, value]) => button([`${name} `, signed(value)], () => open({ turn: turn.index, tab: "rewards" }),
      { class: "chip reward " + tone(value), title: "Who wrote and moved this reward" })) : h("span", { class: "dim" }, "no reward"),
    turn.advantage !== null ? button(["A ", signed(turn.advantage)], () => open({ turn: turn.index, tab: "tokens", color: "advantage" }),
      { class: "chip advantage " + tone(turn.advantage), title: "Mean advantage of the trained tokens of this turn" }) : null);
}

export function turnParts(episode, index) {
  // The elements of one turn: its reply, and what followed until the next one. -1: what came before the first turn.
  const messages = episode.messages.filter((message) => message.turn === index && !message.reply);
  const steps = episode.path.filter((step) => step.turn === index && step.kind !== "generation");
  const transfers = episode.moves.filter((move) => move.at_turn === index && move.op === "transfer");
  return [...messages.map((message) => block(episode.run_key, message)), ...notes(steps), ...moved(transfers)];
}

export function transcript(episode, open) {
  const prompt = turnParts(episode, -1);
  const first = prompt.length > 4;
  const before = first ? h("details", { class: "prompt" }, h("summary", {}, `Prompt: ${prompt.length} messages`), prompt) : prompt;
  return h("div", { class: "transcript" },
    taskCard(episode),
    before,
    episode.turns.map((turn) => {
      const message = episode.messages[turn.message];
      return h("section", { class: "turn", id: `turn-${turn.index}`, tabindex: "-1", "aria-label": `Turn ${turn.index}` },
        turnHead(turn, open),
        h("article", { class: "message assistant" }, message ? content(episode.run_key, message) : null),
        turnParts(episode, turn.index));
    }));
}
