// Facts over time, and the fields of the task.

import { h, prose, shown, table, valueText } from "./dom.js";

export function factsPanel(episode, params, open) {
  const changes = episode.path.flatMap((step) => Object.entries(step.facts || {}).map(([name, value]) => ({ step, name, value })));
  const rows = changes.map(({ step, name, value }) => ({
    props: { class: params.turn !== null && step.turn === params.turn ? "hit-row" : "" },
    cells: [String(step.seq), step.turn < 0 ? "before" : String(step.turn), step.state, h("bdi", {}, shown(name)), prose(valueText(value))],
  }));
  const final = Object.entries(episode.facts).map(([name, value]) => [h("bdi", {}, shown(name)), prose(valueText(value))]);
  return [
    rows.length ? table(["step", "turn", "state", "fact", "value"], rows, { caption: "Facts as they were set" }) : h("p", { class: "empty" }, "No fact was set."),
    final.length ? table(["fact", "value"], final, { caption: "Facts at the end", rowheads: true }) : null,
    table(["field", "value"], Object.entries(episode.task.fields).map(([name, value]) => [h("bdi", {}, shown(name)), prose(valueText(value))]), { caption: "Fields of the task", rowheads: true }),
  ];
}
