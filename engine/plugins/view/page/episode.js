// One episode: the transcript on the left, panels about the selected turn on the right.

import { announce, button, h, inline, integer, many, prose, seconds } from "./dom.js";
import { get, offline } from "./data.js";
import { address, go, listParams } from "./route.js";
import { badge } from "./list.js";
import { transcript } from "./transcript.js";
import { finalReward, rewardsPanel } from "./rewards.js";
import { firstTrained, tokensPanel } from "./tokens.js";
import { seenPanel } from "./seen.js";
import { branchesPanel } from "./branches.js";
import { machinePanel } from "./machine.js";
import { factsPanel } from "./facts.js";
import { timingPanel } from "./timing.js";
import { mayReview, review, reviewPanel } from "./review.js";

const PANELS = {
  rewards: ["Rewards", rewardsPanel],
  tokens: ["Tokens", tokensPanel],
  seen: ["Seen", seenPanel],
  branches: ["Branches", branchesPanel],
  machine: ["Machine", machinePanel],
  facts: ["Facts", factsPanel],
  timing: ["Timing", timingPanel],
  review: ["Review", reviewPanel],
};
const AGAIN = 3000;

function ended(episode) {
  const outcome = episode.outcome;
  if (!outcome) return { status: episode.status, outcome: "", state: episode.path.at(-1)?.dest || "" };
  const failure = outcome.failure;
  const word = failure ? `failed: ${failure.kind} (${failure.blame})` : outcome.limit ? `limit: ${outcome.limit}` : outcome.solved ? "solved" : outcome.event;
  return { status: "done", failure: failure?.kind, limit: outcome.limit, solved: outcome.solved, outcome: word };
}

function why(episode, open) {
  const outcome = episode.outcome;
  const failure = outcome?.failure;
  if (failure) {
    return h("section", { class: "why bad", "aria-label": "Why it failed" },
      h("p", {}, h("b", {}, failure.kind), ` · blame: ${failure.blame} · in ${failure.state || "—"} at `,
        failure.turn >= 0 ? button(`turn ${failure.turn}`, () => open({ turn: failure.turn }), { class: "link" }) : "the beginning"),
      h("p", { class: "prose", dir: "auto" }, failure.message),
      failure.trace ? h("details", {}, h("summary", {}, "Traceback"), prose(failure.trace, "trace")) : null);
  }
  if (outcome?.limit) {
    const step = episode.path.find((each) => each.kind === "limit");
    return h("section", { class: "why warn", "aria-label": "Why it ended" },
      h("p", {}, `Ended by the limit ${outcome.limit}`, step ? `, which reached ${step.value} in ${step.state}` : "", "."));
  }
  return null;
}

function reasons(counts) {
  // Why branches began, after their number.
  const words = Object.entries(counts).map(([reason, count]) => `${count} ${reason}`);
  return words.length ? ` (${words.join(", ")})` : "";
}

function head(episode, params, around, toTrained) {
  const outcome = episode.outcome;
  const list = listParams(params);
  const facts = [
    outcome ? finalReward(outcome, "big") : null,
    badge(ended(episode)),
    outcome && !outcome.trainable ? h("span", { class: "badge bad" }, "not trainable: its tokens are not trained") : null,
    episode.evaluation ? h("span", { class: "badge" }, "of an evaluation, which trains nothing") : null,
    h("span", { class: "dim" }, [many(episode.turns.length, "turn"), many(episode.counts.sampled_tokens ?? episode.turns.reduce((sum, turn) => sum + turn.tokens, 0), "sampled token"),
      episode.finished ? `${episode.branches.length} ${episode.branches.length === 1 ? "branch" : "branches"}${reasons(episode.branch_reasons)}` : null,
      episode.ended ? seconds(episode.ended - episode.started) : null,
      episode.attempts > 1 ? `attempt ${episode.attempt + 1} of ${episode.attempts}` : null, `seed ${episode.seed}`].filter(Boolean).join(" · ")),
  ];
  const step = (pair, text, rel) => (pair ? h("a", { rel, class: "button", href: address("episode", { run: pair[0], id: pair[1], ...list, tab: params.tab }) }, text)
    : h("span", { class: "button off", "aria-hidden": "true" }, text));
  return h("div", { class: "episode-head" },
    h("nav", { class: "crumbs", "aria-label": "Position" },
      h("a", { href: address("list", list) }, "Episodes"), " / ",
      h("a", { href: address("group", { run: params.run, task: episode.task.id }), title: "Samples of this task side by side (g)" }, "task ", inline(episode.task.id, 60)),
      ` / sample ${episode.sample}`,
      h("span", { class: "grow" }),
      around.position >= 0 ? h("span", { class: "dim" }, `${integer(around.position + 1)} of ${integer(around.total)}`) : null,
      step(around.previous, "← previous", "prev"), step(around.next, "next →", "next")),
    h("h1", {}, inline(episode.episode, 100)),
    h("div", { class: "facts-line" }, facts, h("span", { class: "grow" }),
      outcome?.trainable ? button(["First trained token", h("kbd", { "aria-hidden": "true" }, "t")], toTrained) : null,
      offline || !episode.finished ? null : makeTest(params)));
}

const FOCUSABLE = "a[href], button, input, select, summary, [tabindex]";

function replaced(place, children) {
  // Replace the content of an element, and give the focus to what stands where it was.
  const before = [...place.querySelectorAll(FOCUSABLE)];
  const at = before.indexOf(document.activeElement);
  place.replaceChildren(...[children].flat().filter(Boolean));
  const now = at < 0 ? null : place.querySelectorAll(FOCUSABLE)[at];
  if (now && now.tagName === before[at].tagName) now.focus({ preventScroll: true });
}

export async function episodePage(main, params, sources) {
  let given = params;
  let timer = null;
  const load = async () => {
    const found = await get("episode", { run: given.run, id: given.id, attempt: offline ? null : given.attempt });
    found.run_key = given.run;
    return found;
  };
  let episode = await load();
  const around = await get("neighbours", { run: params.run, episode: params.id, ...listParams(params) }).catch(() => ({ position: -1 }));

  const open = (change) => go("episode", { ...given, ...change }, false);
  const panel = h("div", { class: "panel-body", role: "tabpanel", id: "panel", tabindex: "0" });
  const tabs = h("div", { class: "tabs", role: "tablist", "aria-label": "About this episode" });
  const left = h("div", { class: "left" });
  const shell = h("div", { class: "episode" }, left, h("aside", { class: "panel", "aria-label": "Details" }, tabs, panel));

  const toTrained = async () => {
    const there = await firstTrained(episode);
    if (there === null) announce("No token of this episode is trained");
    else open({ tab: "tokens", scope: "branch", ...there });
    panel.querySelector('.token[aria-selected="true"]')?.focus();
  };

  const draw = () => {
    main.replaceChildren(head(episode, given, around, toTrained), ...[why(episode, open)].filter(Boolean), shell);
    left.replaceChildren(transcript(episode, open));
  };
  const tab = () => (given.tab in PANELS ? given.tab : "rewards");

  let asked = 0;
  const select = async (scroll, toToken = false) => {
    const number = ++asked;
    const turn = given.turn === undefined ? null : Number(given.turn);
    for (const each of left.querySelectorAll(".turn.selected")) each.classList.remove("selected");
    const chosen = turn === null ? null : left.querySelector(`#turn-${turn}`);
    chosen?.classList.add("selected");
    if (scroll) chosen?.scrollIntoView({ block: "nearest", behavior: scroll === "smooth" ? "smooth" : "auto" });
    replaced(tabs, Object.entries(PANELS).map(([name, [title]], at) => button([title, h("kbd", { "aria-hidden": "true" }, at + 1)], () => open({ tab: name }),
      { role: "tab", id: `tab-${name}`, "aria-selected": String(name === tab()), "aria-controls": "panel", tabindex: name === tab() ? "0" : "-1" })));
    panel.setAttribute("aria-labelledby", `tab-${tab()}`);
    panel.dataset.tab = tab();
    panel.setAttribute("aria-busy", "true");
    try {
      const made = await PANELS[tab()][1](episode, { ...given, turn, run: given.run }, open, sources.reviewer);
      if (number === asked) replaced(panel, made);
      if (number === asked && toToken) panel.querySelector(`.token[data-at="${given.token}"]`)?.focus();
    } catch (error) {
      if (number === asked) panel.replaceChildren(h("p", { class: "error", role: "alert" }, error.message));
    }
    if (number === asked) panel.removeAttribute("aria-busy");
  };

  tabs.addEventListener("keydown", (event) => {
    const names = Object.keys(PANELS);
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by) return;
    event.preventDefault();
    const next = names[(names.indexOf(tab()) + by + names.length) % names.length];
    open({ tab: next });
    requestAnimationFrame(() => document.getElementById(`tab-${next}`)?.focus());
  });

  draw();
  await select(false, false);

  const again = async () => {
    try {
      const before = episode.path.length;
      episode = await load();
      if (episode.path.length !== before || episode.finished) { draw(); await select(false); }
    } catch { /* the server may have stopped */ }
    if (timer !== null && !episode.finished) timer = setTimeout(again, AGAIN);
  };
  if (!episode.finished && episode.status === "running" && !offline) timer = setTimeout(again, AGAIN);

  const turnBy = (by) => {
    const last = episode.turns.length - 1;
    const now = given.turn === undefined ? (by > 0 ? -1 : last + 1) : Number(given.turn);
    const next = Math.max(0, Math.min(last, now + by));
    if (last >= 0) { open({ turn: next }); announce(`Turn ${next}`); }
  };
  const rated = async (rating) => {
    if (!mayReview(episode, sources.reviewer)) return;
    await review(episode, sources.reviewer, { rating }).catch((error) => announce(error.message));
    if (tab() === "review") await select(false);
  };
  const keys = [
    ["j", "Next turn", () => turnBy(1)],
    ["k", "Previous turn", () => turnBy(-1)],
    ["n", "Next episode of the list", () => main.querySelector("a[rel=next]")?.click()],
    ["p", "Previous episode of the list", () => main.querySelector("a[rel=prev]")?.click()],
    ...(episode.outcome?.trainable ? [["t", "First trained token", toTrained]] : []),
    ["g", "Samples of this task side by side", () => go("group", { run: given.run, task: episode.task.id })],
    ["+", "Rate this episode as good", () => rated(1)],
    ["-", "Rate this episode as bad", () => rated(-1)],
    ["u Escape", "Back to the list", () => go("list", listParams(given))],
    ...Object.entries(PANELS).map(([name, [title]], at) => [String(at + 1), title, () => open({ tab: name })]),
  ];

  return {
    keys,
    shown: () => left.querySelector(".turn.selected")?.scrollIntoView({ block: "nearest" }),
    title: `${episode.episode} · episode`,
    close: () => { clearTimeout(timer); timer = null; },
    update: (next) => {
      if (next.run !== given.run || next.id !== given.id || next.attempt !== given.attempt) return false;
      const moved = next.turn !== given.turn;
      const toToken = next.token !== undefined && next.token !== given.token;
      given = next;
      select(moved ? "smooth" : false, toToken);
      return true;
    },
  };
}

function scenarioDialog(made) {
  const file = new Blob([made.text], { type: "application/yaml" });
  const address_ = URL.createObjectURL(file);
  const dialog = h("dialog", { class: "scenario", "aria-labelledby": "scenario-title" },
    h("h2", { id: "scenario-title" }, "A test of this episode"),
    h("p", {}, "It was played and passes. Save it beside the spec, and play it with ", h("code", {}, "engine test"), "."),
    made.notes.map((note) => h("p", { class: "dim" }, note)),
    h("div", { class: "scroll yaml", tabindex: "0", role: "region", "aria-label": "The file" }, h("pre", {}, made.text)),
    h("form", { method: "dialog" }, h("a", { class: "button", href: address_, download: "recorded.scenarios.yaml" }, "Save"), " ", h("button", { autofocus: true }, "Close")));
  dialog.addEventListener("close", () => { URL.revokeObjectURL(address_); dialog.remove(); });
  document.body.append(dialog);
  dialog.showModal();
}

function makeTest(params) {
  // Playing the scenario imports the spec's code, so it happens only on request.
  const make = button("Make a test of this episode", async () => {
    make.disabled = true;
    try {
      scenarioDialog(await get("scenario", { run: params.run, id: params.id }));
    } catch (error) {
      make.after(h("span", { class: "error", role: "alert" }, " ", error.message));
    } finally {
      make.disabled = false;
    }
  }, { title: "Writes a scenario with the recorded replies, and plays it once with the spec's code" });
  return make;
}
