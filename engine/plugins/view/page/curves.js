// The curves of one metric: a line a training, with axes and smoothing as chosen. The chart library is loaded when it is needed first.

import { h, integer } from "./dom.js";

export const AXES = { linear: "linear", y: "logarithmic values", x: "logarithmic steps", xy: "both logarithmic" };
export const SMOOTHING = { 1: "none", 5: "mean of 5 steps", 20: "mean of 20 steps", 100: "mean of 100 steps" };
export const COLOURS = ["#3b82c4", "#d1762a", "#3f9d63", "#c2557f", "#7c5cc4", "#8a7a2a"];
const MARKED = 60;
let library = null;

function charts() {
  library ??= new Promise((resolve, reject) => {
    const script = h("script", { src: "static/plotly.js" });
    script.addEventListener("load", () => resolve(globalThis.Plotly));
    script.addEventListener("error", () => reject(new Error("The chart library is not installed: pip install 'episode-engine[view]'.")));
    document.head.append(script);
  });
  return library;
}

function ink() {
  const style = getComputedStyle(document.body);
  return { text: style.color, line: getComputedStyle(document.querySelector("#top")).borderBottomColor };
}

function smoothed(values, count) {
  // The mean of each value and those before it, `count` at most.
  let sum = 0;
  return values.map((value, at) => {
    sum += value - (at >= count ? values[at - count] : 0);
    return sum / Math.min(at + 1, count);
  });
}

export async function curves(place, note, lines, { axes, smooth }, pick) {
  // lines: [{name, points: [[step, value], …]}]. A click on a point calls pick(step, name).
  const plotly = await charts();
  const { text, line } = ink();
  const traces = lines.flatMap(({ name, points }, at) => {
    const x = points.map(([step]) => step);
    const y = points.map(([, value]) => value);
    const trace = { x, type: "scatter", mode: points.length > MARKED ? "lines" : "lines+markers", marker: { size: 5, color: COLOURS[at % COLOURS.length] }, name, meta: name, hovertemplate: "step %{x}: %{y}<extra></extra>" };
    const style = { color: COLOURS[at % COLOURS.length], width: 1.6 };
    if (smooth === 1) return [{ ...trace, y, line: style }];
    return [{ ...trace, y, line: { ...style, width: 1 }, opacity: 0.3 }, { ...trace, y: smoothed(y, smooth), mode: "lines", line: style }];
  });
  const axis = { gridcolor: line, zerolinecolor: line, linecolor: line, automargin: true };
  const layout = { margin: { l: 44, r: 8, t: 6, b: 34 }, paper_bgcolor: "transparent", plot_bgcolor: "transparent", font: { color: text, size: 11 }, showlegend: false,
    xaxis: { ...axis, type: axes.includes("x") ? "log" : "linear", title: { text: "step" } }, yaxis: { ...axis, type: axes.includes("y") ? "log" : "linear" } };
  const first = !place.on;
  await plotly.react(place, traces, layout, { displayModeBar: false, responsive: true });
  if (first) place.on("plotly_click", (event) => pick(event.points[0].x, event.points[0].data.meta));
  const hidden = lines.flatMap(({ points }) => points).filter(([step, value]) => (axes.includes("y") && value <= 0) || (axes.includes("x") && step <= 0)).length;
  note.textContent = hidden ? `${integer(hidden)} points at or below 0 are not drawn: the axis is logarithmic.` : "";
}
