// Timings: one bar a step, with the parts of a generation: queue, prompt from the cache, generation.

import { h, integer, seconds, table } from "./dom.js";

const KINDS = { reset: "environment", step: "environment", score: "score", generation: "generation", tools: "tools", user: "user", condense: "condense" };

function bar(step, total) {
  const percent = (value) => `${Math.min(100, (100 * value) / total).toFixed(3)}%`;
  const kind = KINDS[step.kind] || "other";
  const queue = step.queue_seconds || 0;
  const title = [`${kind} ${seconds(step.seconds)}`, queue ? `queue ${seconds(queue)}` : ""].filter(Boolean).join(", ");
  return h("div", { class: "lane", title },
    queue ? h("span", { class: "part queue", style: { left: percent(step.at), width: percent(queue) } }) : null,
    h("span", { class: "part " + kind, style: { left: percent(step.at + queue), width: percent(Math.max(step.seconds - queue, 0)) } }));
}

export function timingPanel(episode, params, open) {
  const steps = episode.path;
  if (!steps.length) return h("p", { class: "empty" }, "Nothing has happened yet.");
  const total = Math.max(1e-9, ...steps.map((step) => step.at + step.seconds));
  const sums = new Map();
  for (const step of steps) {
    const queue = step.queue_seconds || 0;
    const kind = KINDS[step.kind] || "other";
    sums.set(kind, (sums.get(kind) || 0) + step.seconds - queue);
    if (queue) sums.set("queue", (sums.get("queue") || 0) + queue);
  }
  const busy = [...sums.values()].reduce((sum, each) => sum + each, 0);
  const rest = Math.max(0, total - busy);
  if (rest > total / 1000) sums.set("waiting", rest);
  const share = [...sums].sort((a, b) => b[1] - a[1]);
  return [
    h("div", { class: "whole", role: "img", "aria-label": share.map(([kind, value]) => `${kind} ${seconds(value)}`).join(", ") },
      share.map(([kind, value]) => h("span", { class: "part " + kind, style: { width: `${(100 * value) / (busy + rest)}%` }, title: `${kind} ${seconds(value)}` }))),
    h("ul", { class: "legend" }, share.map(([kind, value]) => h("li", {}, h("span", { class: "swatch " + kind }), `${kind} ${seconds(value)} · ${((100 * value) / (busy + rest)).toFixed(0)} %`))),
    table(["step", "turn", "what", "when", { text: "start", class: "number" }, { text: "took", class: "number" }, { text: "queue", class: "number" }, { text: "prompt", class: "number" }, { text: "from cache", class: "number" }],
      steps.map((step) => ({
        props: { class: params.turn !== null && step.turn === params.turn ? "hit-row" : "" },
        cells: [String(step.seq), step.turn < 0 ? "" : String(step.turn),
          step.tools ? step.tools.map((tool) => `${tool.name} ${seconds(tool.seconds)}`).join(", ") || step.kind : step.kind, bar(step, total), seconds(step.at), seconds(step.seconds),
          step.queue_seconds ? seconds(step.queue_seconds) : "", step.prompt_tokens ? integer(step.prompt_tokens) : "",
          step.prompt_tokens ? `${integer(step.cached_tokens)} (${((100 * step.cached_tokens) / step.prompt_tokens).toFixed(0)} %)` : ""],
      })), { caption: "Steps in time", class: "timing" }),
  ];
}
