// Trainings: curves of their metrics, one above the other, with what each metric means. They follow a training that runs.

import { button, h, inline, integer, table, put } from "./dom.js";
import { get } from "./data.js";
import { address, go } from "./route.js";
import { AXES, COLOURS, SMOOTHING, curves } from "./curves.js";

const FIRST = ["reward/mean", "eval/solved", "eval/reward", "episode/solved", "policy/entropy", "loss", "grad_norm"];
const FOLLOW = 3000;
const REST = 20000;
const MOST_STEPS = 200;
const BAD = ["diverged", "failed"];

function ofStep(name, step) {
  return `run.id == "${name}/rollouts" && run.step == ${step}`;
}

function words(value) {
  return value === undefined || value === null ? "" : Number(value).toPrecision(5);
}

function bannerList(trainings) {
  return trainings.flatMap((each) => each.banners.map(({ kind, title, text }) => h("section", { class: "why " + (BAD.includes(kind) ? "bad" : "warn"), role: "status", "data-kind": kind },
    h("p", {}, h("b", {}, title), trainings.length > 1 ? [" · ", inline(each.training, 60)] : null), h("p", { class: "prose", dir: "auto" }, text))));
}

function newest(trainings, chosen) {
  // The newest value of each metric, a training a row.
  return table(["training", "state", { text: "step", class: "number" }, ...chosen.map((text) => ({ text, class: "number" }))],
    trainings.map((each, at) => [[h("span", { class: "swatch", style: { background: COLOURS[at % COLOURS.length] } }), inline(each.training, 60)], each.status,
      `${integer(each.steps.at(-1) ?? 0)}${each.planned ? ` of ${integer(each.planned)}` : ""}`, ...chosen.map((name) => words(each.metrics[name]?.at(-1)?.[1]))]),
    { caption: "Newest values", rowheads: true });
}

function evaluations(training) {
  if (!training.evaluations.length) return null;
  const measured = [...new Set(training.evaluations.flatMap((each) => Object.keys(each.metrics)))].slice(0, 8);
  return table(["evaluation", { text: "step", class: "number" }, ...measured.map((text) => ({ text: text.replace("eval/", ""), class: "number" })), "episodes"],
    training.evaluations.map((each) => [inline(each.run, 60), integer(each.step), ...measured.map((name) => words(each.metrics[name])), h("a", { href: address("list", { within: training.training, filter: each.filter }) }, "episodes")]),
    { caption: "Evaluations", rowheads: true });
}

function stepTable(training, chosen, params, all, showAll) {
  const values = chosen.map((name) => new Map(training.metrics[name] || []));
  const steps = all ? training.steps : training.steps.slice(-MOST_STEPS);
  const rows = steps.map((at) => ({
    props: { class: at === Number(params.step) ? "hit-row" : "" },
    cells: [h("a", { href: address("training", { ...params, step: at }) }, `step ${at}`), ...values.map((each) => words(each.get(at))),
      h("a", { href: address("list", { within: training.training, filter: ofStep(training.training, at) }) }, "episodes")],
  }));
  return [table(["step", ...chosen.map((text) => ({ text, class: "number" })), "episodes"], rows, { caption: "Steps", rowheads: true }),
    steps.length < training.steps.length ? button(`Show all ${integer(training.steps.length)} steps`, showAll, { class: "more" }) : null];
}

function choice(label, options, value, change) {
  return h("label", { class: "field" }, label,
    h("select", { onchange: (event) => change(event.target.value) }, Object.entries(options).map(([key, text]) => h("option", { value: key, selected: key === value }, text))));
}

function meaning(explained) {
  if (!explained) return null;
  const [what, bad] = explained;
  return [h("p", { class: "dim" }, what), bad ? h("p", { class: "dim" }, h("b", {}, "Look here if: "), bad) : null];
}

export async function trainingPage(main, given, sources) {
  const name = given.training || sources.trainings[0];
  const params = { ...given, training: name };
  const names = [name, ...(given.with ? given.with.split(",").filter((each) => each !== name) : [])];
  const load = () => Promise.all(names.map((training) => get("training", { training })));
  let trainings = await load();
  let all = false;
  const there = [...new Set(trainings.flatMap((each) => Object.keys(each.metrics)))].sort();
  const first = FIRST.filter((each) => there.includes(each));
  const chosen = given.metrics !== undefined ? given.metrics.split(",").filter((each) => there.includes(each)) : [...first, ...there.filter((each) => !first.includes(each))].slice(0, 4);
  const step = given.step === undefined ? null : Number(given.step);
  const change = (changes) => go("training", { ...params, ...changes });
  const toggle = (other) => {
    const left = names.includes(other) ? names.filter((each) => each !== other) : [...names, other];
    if (left.length) go("training", { ...params, training: left[0], with: left.slice(1).join(","), step: left[0] === name ? given.step : null });
  };
  const options = { axes: given.axes in AXES ? given.axes : "linear", smooth: given.smooth in SMOOTHING ? Number(given.smooth) : 1 };
  const charts = chosen.map((each) => ({ name: each, place: h("div", { class: "plot", role: "img", "aria-label": `${each} by step; the table below has the values` }), note: h("p", { class: "dim" }) }));
  const explained = (each) => trainings.map((training) => training.explained[each]).find(Boolean);
  const places = { banners: h("div", {}), newest: h("div", {}), tables: h("div", {}) };
  put(main,
    h("h1", {}, names.length > 1 ? `${names.length} trainings` : ["Training ", inline(name, 80)]),
    places.banners,
    sources.trainings.length > 1 ? h("fieldset", { class: "samples" }, h("legend", {}, "Trainings"), sources.trainings.map((each) => h("label", {},
      h("input", { type: "checkbox", checked: names.includes(each), onchange: () => toggle(each) }), inline(each, 60)))) : null,
    h("div", { class: "search" },
      choice("Add a metric", { "": "add a metric…", ...Object.fromEntries(there.filter((each) => !chosen.includes(each)).map((each) => [each, each])) }, "", (each) => change({ metrics: [...chosen, each].join(",") })),
      choice("Axes", AXES, options.axes, (axes) => change({ axes: axes === "linear" ? null : axes })),
      choice("Smoothing", SMOOTHING, String(options.smooth), (smooth) => change({ smooth: smooth === "1" ? null : smooth }))),
    step === null ? h("p", { class: "dim" }, "Choose a point or a step to see its episodes.") : h("p", { class: "why warn" }, `Step ${step}: `, h("a", { href: address("list", { within: name, filter: ofStep(name, step) }) }, "the episodes that it sampled")),
    places.newest,
    h("div", { class: "charts" }, charts.map(({ name: each, place, note }) => h("section", { class: "chart" },
      h("h2", {}, each, " ", button("×", () => change({ metrics: chosen.filter((other) => other !== each).join(",") || "none" }), { class: "link", "aria-label": `Remove ${each}` })), place, note, meaning(explained(each))))),
    places.tables);

  const drawTables = () => {
    const focused = document.activeElement && main.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
    put(places.newest, names.length > 1 ? newest(trainings, chosen) : null);
    put(places.tables, evaluations(trainings[0]), stepTable(trainings[0], chosen, params, all, () => { all = true; drawTables(); }));
    if (focused) [...main.querySelectorAll("a")].find((each) => each.getAttribute("href") === focused)?.focus();
  };
  const drawCurves = () => charts.forEach(({ name: each, place, note }) => {
    const pick = (at, training) => go("training", { ...params, training, with: names.filter((other) => other !== training).join(","), step: at });
    curves(place, note, trainings.map((training) => ({ name: training.training, points: training.metrics[each] || [] })), options, pick)
      .catch((error) => place.replaceChildren(h("p", { class: "empty" }, error.message)));
  });
  put(places.banners, bannerList(trainings));
  drawTables();

  const state = () => JSON.stringify(trainings.map((each) => [each.status, each.steps.length, each.steps.at(-1), each.evaluations.length]));
  const warned = () => JSON.stringify(trainings.map((each) => each.banners));
  let timer = null;
  const again = async () => {
    try {
      const before = [state(), warned()];
      if (!document.hidden) trainings = await load();
      if (timer === null) return;
      if (warned() !== before[1]) put(places.banners, bannerList(trainings));
      if (state() !== before[0]) { drawTables(); drawCurves(); }
    } catch { /* the server may have stopped */ }
    if (timer !== null) wait();
  };
  const wait = () => { timer = setTimeout(again, trainings.some((each) => each.status === "running") ? FOLLOW : REST); };
  wait();

  const by = (difference) => {
    const steps = trainings[0].steps;
    if (steps.length) change({ step: steps[Math.max(0, Math.min(steps.length - 1, steps.indexOf(step) + difference))] });
  };
  const keys = [["u Escape", "Back to the list", () => go("list", {})], ["j", "Next step", () => by(1)], ["k", "Previous step", () => by(-1)],
    ["e", "Episodes of the step", () => step !== null && go("list", { within: name, filter: ofStep(name, step) })]];
  return { keys, shown: drawCurves, title: names.length > 1 ? `${names.length} trainings` : `Training ${name}`, close: () => { clearTimeout(timer); timer = null; } };
}
