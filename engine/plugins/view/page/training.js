// A training: curves of its metrics, with steps linked to their episodes, and its evaluations.

import { button, h, inline, integer, table, put } from "./dom.js";
import { get } from "./data.js";
import { address, go } from "./route.js";

const FIRST = ["reward/mean", "eval/solved", "eval/reward", "episode/solved", "policy/entropy", "loss", "grad_norm"];
let library = null;

function charts() {
  // The chart library, loaded when it is needed first.
  library ??= new Promise((resolve, reject) => {
    const script = h("script", { src: "static/plotly.js" });
    script.addEventListener("load", () => resolve(globalThis.Plotly));
    script.addEventListener("error", () => reject(new Error("The chart library is not installed: pip install 'episode-engine[view]'.")));
    document.head.append(script);
  });
  return library;
}

function ofStep(step) {
  return `run.step == ${step} && !run.evaluation`;
}

function ink() {
  const style = getComputedStyle(document.body);
  return { text: style.color, line: getComputedStyle(document.querySelector("#top")).borderBottomColor };
}

async function curve(place, name, points, choose) {
  const plotly = await charts();
  const { text, line } = ink();
  const axis = { gridcolor: line, zerolinecolor: line, linecolor: line, automargin: true };
  await plotly.newPlot(place, [{ x: points.map(([step]) => step), y: points.map(([, value]) => value), type: "scatter", mode: points.length > 60 ? "lines" : "lines+markers", line: { color: "#3b82c4", width: 1.6 }, marker: { size: 5 }, hovertemplate: "step %{x}: %{y}<extra></extra>" }],
    { margin: { l: 44, r: 8, t: 6, b: 34 }, paper_bgcolor: "transparent", plot_bgcolor: "transparent", font: { color: text, size: 11 }, xaxis: { ...axis, title: { text: "step" } }, yaxis: axis, showlegend: false },
    { displayModeBar: false, responsive: true });
  place.on("plotly_click", (event) => choose(event.points[0].x));
}

export async function trainingPage(main, params, sources) {
  const name = params.training || sources.trainings[0];
  const found = await get("training", { training: name });
  const names = Object.keys(found.metrics);
  const first = FIRST.filter((each) => names.includes(each));
  const chosen = params.metrics ? params.metrics.split(",").filter((each) => names.includes(each)) : [...first, ...names.filter((each) => !first.includes(each))].slice(0, 4);
  const step = params.step === undefined ? null : Number(params.step);
  const choose = (at) => go("training", { ...params, training: name, step: at });
  const places = chosen.map((each) => h("div", { class: "plot", role: "img", "aria-label": `${each} by step; the table below has the values` }));
  const add = h("select", { "aria-label": "Add a metric", onchange: (event) => go("training", { ...params, training: name, metrics: [...chosen, event.target.value].join(",") }) },
    h("option", { value: "" }, "add a metric…"), names.filter((each) => !chosen.includes(each)).map((each) => h("option", { value: each }, each)));
  const remove = (each) => go("training", { ...params, training: name, metrics: chosen.filter((other) => other !== each).join(",") });
  const list = (filter, text) => h("a", { href: address("list", { filter }) }, text);
  const measured = [...new Set(found.evaluations.flatMap((each) => Object.keys(each.metrics)))].slice(0, 8);
  const values = new Map(chosen.map((each) => [each, new Map(found.metrics[each])]));
  const rows = found.steps.map((at) => ({
    props: { class: at === step ? "hit-row" : "" },
    cells: [h("a", { href: address("training", { ...params, training: name, step: at }) }, `step ${at}`),
      ...chosen.map((each) => { const value = values.get(each).get(at); return value === undefined || value === null ? "" : Number(value).toPrecision(5); }),
      list(ofStep(at), "episodes")],
  }));
  put(main, 
    h("h1", {}, "Training ", inline(name, 80)),
    sources.trainings.length > 1 ? h("label", { class: "field" }, "Training", h("select", { onchange: (event) => go("training", { training: event.target.value }) }, sources.trainings.map((each) => h("option", { value: each, selected: each === name }, each)))) : null,
    step === null ? h("p", { class: "dim" }, "Choose a point or a step to see its episodes.") : h("p", { class: "why warn" }, `Step ${step}: `, list(ofStep(step), "the episodes that it sampled")),
    h("div", { class: "charts" }, chosen.map((each, at) => h("section", { class: "chart" }, h("h2", {}, each, " ", button("×", () => remove(each), { class: "link", "aria-label": `Remove ${each}` })), places[at]))),
    h("p", {}, add),
    found.evaluations.length ? table(["evaluation", { text: "step", class: "number" }, ...measured.map((text) => ({ text: text.replace("eval/", ""), class: "number" })), "episodes"],
      found.evaluations.map((each) => [inline(each.run, 60), integer(each.step), ...measured.map((name) => { const value = each.metrics[name]; return value === undefined || value === null ? "" : value.toFixed(3); }), list(each.filter, "episodes")]),
      { caption: "Evaluations", rowheads: true }) : null,
    table(["step", ...chosen.map((text) => ({ text, class: "number" })), "episodes"], rows, { caption: "Steps", rowheads: true }));
  const keys = [["u Escape", "Back to the list", () => go("list", {})],
    ["j", "Next step", () => choose(found.steps[Math.min(found.steps.length - 1, found.steps.indexOf(step) + 1)])],
    ["k", "Previous step", () => choose(found.steps[Math.max(0, found.steps.indexOf(step) - 1)])],
    ["e", "Episodes of the step", () => step !== null && go("list", { filter: ofStep(step) })]];
  const shown = () => chosen.forEach((each, at) => {
    curve(places[at], each, found.metrics[each], choose).catch((error) => places[at].replaceChildren(h("p", { class: "empty" }, error.message)));
  });
  return { keys, shown, title: `Training ${name}` };
}
