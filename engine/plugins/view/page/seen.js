// What the model saw at a turn: the messages that it was shown, and the same as tokens.

import { button, h, integer, table } from "./dom.js";
import { content, who } from "./transcript.js";

export function seenPanel(episode, params, open) {
  const index = params.turn ?? 0;
  const turn = episode.turns[index];
  if (!turn) return h("p", { class: "empty" }, "The episode has no turn yet.");
  const messages = turn.shown.map((each) => (typeof each === "number" ? episode.messages[each] : { ...each, stands: true }));
  const branch = episode.branches.find((each) => each.index === turn.branch);
  return [
    h("p", { class: "dim" }, `Before turn ${index} the model was shown ${messages.length} messages, ${integer(turn.prompt_tokens || turn.start)} tokens `,
      `(${integer(turn.cached_tokens)} of them from the cache), in branch ${turn.branch}`, branch?.reason ? `, which began because ${branch.reason}` : "", "."),
    branch ? h("p", {}, button("Show these tokens", () => open({ turn: index, tab: "tokens", scope: "seen" }), { class: "button" })) : null,
    h("ol", { class: "seen" }, messages.map((message) => h("li", { class: "message " + message.role },
      h("header", {}, h("span", { class: "role" }, who(message)),
        message.reply ? h("span", { class: "dim" }, `turn ${message.turn}`) : null,
        message.stands ? h("span", { class: "badge warn" }, "stands for condensed messages") : null),
      content(params.run, message)))),
  ];
}
