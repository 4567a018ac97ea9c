// The samples of one task side by side, aligned by turn, and where they part.

import { button, h, inline, integer, signed, tone, put } from "./dom.js";
import { get } from "./data.js";
import { address, go } from "./route.js";
import { badge } from "./list.js";
import { finalReward } from "./rewards.js";
import { taskCard, turnParts, content } from "./transcript.js";

const MOST_COLUMNS = 4;

function where(group, first, second) {
  const found = group.parts.find((each) => (each.first === first && each.second === second) || (each.first === second && each.second === first));
  if (!found) return null;
  const texts = found.texts && found.first === second ? [...found.texts].reverse() : found.texts;
  return { ...found, texts };
}

function parting(found, other) {
  if (!found) return null;
  if (found.turn === null) return h("p", { class: "parts" }, `The same as sample ${other}.`);
  if (found.message) return h("p", { class: "parts" }, found.turn < 0 ? `Parts from sample ${other} in the prompt.` : `Parts from sample ${other} in what follows turn ${found.turn}.`);
  return h("p", { class: "parts" }, `Parts from sample ${other} at `, h("b", {}, `turn ${found.turn}`, found.token === null ? "" : `, token ${found.token}`),
    found.texts ? [": ", h("q", {}, inline(found.texts[1], 60)), " instead of ", h("q", {}, inline(found.texts[0], 60))] : "");
}

export async function groupPage(main, params, sources) {
  const group = await get("group", { run: params.run, task: params.task });
  const numbers = group.samples.map((each) => each.sample);
  const chosen = (params.samples ? params.samples.split(",").map(Number).filter((each) => numbers.includes(each)) : numbers.slice(0, MOST_COLUMNS));
  const shownSamples = group.samples.filter((each) => chosen.includes(each.sample));
  const episodes = await Promise.all(shownSamples.map((each) => get("episode", { run: params.run, id: each.id })));
  episodes.forEach((each) => { each.run_key = params.run; });
  const toggle = (sample) => {
    const next = chosen.includes(sample) ? chosen.filter((each) => each !== sample) : [...chosen, sample].sort((a, b) => a - b);
    go("group", { ...params, samples: (next.length ? next : [sample]).join(",") });
  };
  const base = chosen[0];
  const turns = Math.max(0, ...episodes.map((each) => each.turns.length));
  const link = (episode, more, text) => h("a", { href: address("episode", { run: params.run, id: episode.episode, ...more }) }, text);
  const cell = (episode, index) => {
    const turn = episode.turns[index];
    if (!turn) return h("div", { class: "cell gone" });
    const found = episode.sample === base ? null : where(group, base, episode.sample);
    const here = found && found.turn === index;
    const message = episode.messages[turn.message];
    return h("section", { class: "cell" + (here ? " parting" : ""), "aria-label": `Sample ${episode.sample}, turn ${index}` },
      h("header", {}, link(episode, { turn: index, tab: "tokens" }, `turn ${index}`), h("span", { class: "dim" }, ` ${turn.event} · ${integer(turn.tokens)} tokens`), h("span", { class: "grow" }),
        Object.entries(turn.rewards).map(([name, value]) => h("span", { class: "reward " + tone(value) }, `${name} ${signed(value)} `)),
        turn.advantage === null ? null : h("span", { class: "advantage " + tone(turn.advantage), title: "mean advantage of its tokens" }, `A ${signed(turn.advantage)}`)),
      h("article", { class: "message assistant" }, message ? content(params.run, message) : null),
      turnParts(episode, index));
  };
  put(main, 
    h("nav", { class: "crumbs", "aria-label": "Position" }, h("a", { href: address("list", { within: params.run }) }, "Episodes"), " / task ", inline(group.task, 60)),
    h("h1", {}, "Samples of ", inline(group.task, 80)),
    h("fieldset", { class: "samples" }, h("legend", {}, "Show samples"), group.samples.map((each) => h("label", {},
      h("input", { type: "checkbox", checked: chosen.includes(each.sample), onchange: () => toggle(each.sample) }), `${each.sample} `, badge(each), each.reward === null ? "" : h("span", { class: tone(each.reward) }, ` ${signed(each.reward)}`))),
    group.left_out ? h("span", { class: "dim" }, `${integer(group.left_out)} more samples are not compared here`) : null),
    episodes.length ? taskCard(episodes[0]) : null,
    h("div", { class: "group scroll", tabindex: "0", role: "region", "aria-label": "Samples side by side", style: { "--columns": episodes.length } },
      episodes.map((episode) => h("header", { class: "cell head" },
        h("h2", {}, link(episode, {}, `Sample ${episode.sample}`)),
        h("p", {}, badge(group.samples.find((each) => each.sample === episode.sample)), " ", episode.outcome ? finalReward(episode.outcome) : ""),
        episode.sample === base ? h("p", { class: "dim" }, "The others are compared with this one.") : parting(where(group, base, episode.sample), base))),
      Array.from({ length: turns }, (_, index) => episodes.map((episode) => cell(episode, index)))));
  const keys = [
    ["u Escape", "Back to the list", () => go("list", { within: params.run })],
    ...numbers.slice(0, 9).map((sample) => [String(sample), `Show or hide sample ${sample}`, () => toggle(sample)]),
  ];
  return { keys, title: `Samples of ${group.task}` };
}
