// The machine: its picture with the path taken, and the steps one by one.

import { button, h, inline, seconds, table } from "./dom.js";
import { get } from "./data.js";

function drawing(text) {
  // Our own SVG. It is parsed as XML, and only shapes and text of it are shown.
  const parsed = new DOMParser().parseFromString(text, "image/svg+xml");
  const root = document.importNode(parsed.documentElement, true);
  for (const bad of root.querySelectorAll("script, foreignObject, a, image, use")) bad.remove();
  root.setAttribute("role", "img");
  root.setAttribute("aria-label", "State machine; the table below has the path");
  return root;
}

export async function machinePanel(episode, params, open) {
  const steps = episode.path;
  const at = params.step === undefined ? null : Math.max(0, Math.min(steps.length - 1, Number(params.step)));
  const machine = await get("machine", { run: params.run }).catch((error) => ({ svg: null, problem: error.message }));
  const box = h("div", { class: "machine scroll", tabindex: "0", role: "region", "aria-label": "Picture of the machine" });
  if (machine.svg) {
    const root = drawing(machine.svg);
    const seen = new Set(steps.slice(0, at === null ? undefined : at + 1).flatMap((step) => [step.state, step.dest]));
    const now = at === null ? null : steps[at];
    for (const node of root.querySelectorAll("[data-state]")) {
      node.classList.toggle("visited", seen.has(node.dataset.state));
      node.classList.toggle("from", now?.state === node.dataset.state);
      node.classList.toggle("now", (now ? now.dest : steps.at(-1)?.dest) === node.dataset.state);
    }
    for (const edge of root.querySelectorAll("[data-from]")) {
      const events = edge.dataset.events.split(" ");
      const taken = (step) => step.dest === edge.dataset.to && events.includes(step.event) && [step.state, "any state"].includes(edge.dataset.from);
      edge.classList.toggle("taken", steps.slice(0, at === null ? undefined : at + 1).some(taken));
      edge.classList.toggle("now", now !== null && taken(now));
    }
    box.append(root);
  } else box.append(h("p", { class: "empty" }, machine.problem || "There is no picture."));
  const move = (by) => open({ step: at === null ? (by > 0 ? 0 : steps.length - 1) : Math.max(0, Math.min(steps.length - 1, at + by)) });
  return [
    h("p", { class: "stepper" }, button("← step", () => move(-1)), button("step →", () => move(1)),
      h("span", {}, at === null ? `${steps.length} steps` : `step ${at + 1} of ${steps.length}: ${steps[at].state} –${steps[at].event || "end"}→ ${steps[at].dest}`),
      at === null ? null : button("all", () => open({ step: null }), { class: "link" }),
      machine.svg ? button("full size", (event) => event.currentTarget.setAttribute("aria-pressed", String(box.classList.toggle("full"))), { class: "link", "aria-pressed": "false" }) : null),
    box,
    table(["step", "turn", "state", "event", "to", { text: "took", class: "number" }, "what"], steps.map((step, number) => ({
      props: { class: number === at ? "hit-row" : "", "aria-current": number === at ? "step" : null },
      cells: [button(String(step.seq), () => open({ step: number, turn: step.turn >= 0 ? step.turn : null }), { class: "link" }), step.turn < 0 ? "" : String(step.turn), step.state, step.event, step.dest, seconds(step.seconds), what(step)],
    })), { caption: "The path, step by step" }),
  ];
}

function what(step) {
  if (step.kind === "generation") return `${step.tokens} tokens, ${step.finish}${step.problem ? ": " + step.problem : ""}`;
  if (step.tools) return step.tools.map((tool) => tool.name + (tool.error ? `: ${tool.error}` : "")).join(", ");
  if (step.kind === "user") return [step.solved && "solved", step.satisfied && "satisfied", step.recover].filter(Boolean).join(", ") || "answered";
  if (step.kind === "failure") return inline(`${step.failure.kind}: ${step.failure.message}`, 160);
  if (step.kind === "limit") return `${step.limit} reached ${step.value}`;
  if (step.kind === "condense") return `${step.before} → ${step.after} tokens`;
  if (step.marks) return `${step.marks.length} rewards`;
  return "";
}
