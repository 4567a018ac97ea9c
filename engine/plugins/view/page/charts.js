// A row of charts over the list. Each bar is a link that chooses its episodes, or takes that choice back.

import { h, integer, seconds, svg } from "./dom.js";
import { address } from "./route.js";

export function narrowed(filter, more) {
  // A filter with one condition more; without it if it has it already.
  if (!filter) return more;
  if (filter === more) return "";
  if (filter.endsWith(` && ${more}`)) return filter.slice(0, -more.length - 4);
  return `${filter.includes("||") && !filter.startsWith("(") ? `(${filter})` : filter} && ${more}`;
}

function upright(chart, link) {
  const most = Math.max(...chart.bars.map((bar) => bar.value)) || 1;
  const step = 240 / chart.bars.length;
  const width = Math.min(step, 36);
  return [
    svg("svg", { viewBox: "0 0 240 80", role: "group", "aria-label": chart.title }, chart.bars.map((bar, at) => {
      if (!bar.value) return null;
      const height = Math.max(1.5, 78 * bar.value / most);
      return svg("a", link(bar), svg("title", {}, `${bar.label}: ${bar.text}`), svg("rect", { class: "room", x: at * step, width, height: 80 }),
        svg("rect", { class: `bar ${bar.tone}`, x: at * step + width * 0.08, y: 80 - height, width: width * 0.84, height }));
    })),
    h("p", { class: "ends" }, h("span", {}, chart.bars[0].label), chart.bars.length > 1 ? h("span", {}, chart.bars.at(-1).label) : null),
  ];
}

function lying(chart, link) {
  const most = Math.max(...chart.bars.map((bar) => bar.value)) || 1;
  const number = { outcome: integer, task: (share) => `${(100 * share).toFixed(0)} %`, state: seconds }[chart.name];
  return h("ul", {}, chart.bars.map((bar) => h("li", {}, h("a", { ...link(bar), title: bar.text },
    h("bdi", {}, bar.label), svg("svg", { viewBox: "0 0 40 10", width: 40, height: 10, "aria-hidden": "true" }, svg("rect", { class: `bar ${bar.tone}`, width: Math.max(0.5, 40 * bar.value / most), height: 10 })), h("b", {}, number(bar.value))))));
}

export function chartRow(found, params) {
  const link = (bar) => ({ href: address("list", { ...params, filter: narrowed(params.filter, bar.filter), page: null }), "aria-label": `${bar.label}: ${bar.text}`,
    "aria-current": params.filter && narrowed(params.filter, bar.filter).length < params.filter.length ? "true" : null });
  return h("div", { class: "chart-row" }, found.map((chart) => h("section", { class: "small-chart", "data-chart": chart.name, "aria-label": chart.title },
    h("h2", {}, chart.title), chart.kind === "rows" ? lying(chart, link) : upright(chart, link))));
}
