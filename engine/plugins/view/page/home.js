// The runs and trainings, newest first. Numbers of a row come when it is shown; the list itself needs no episode.

import { button, h, inline, integer, many, put, seconds, signed, svg, table, tone } from "./dom.js";
import { get } from "./data.js";
import { address, go } from "./route.js";
import { chosenColumns, columnChoice } from "./columns.js";

const ROWS = 50;
const AT_ONCE = 4;
const LOOK_AGAIN = 6000;
const ENDS = { solved: "solved", ended: "ended otherwise", limit: "ended by a limit", failed: "failed" };
const STATES = { running: "going", done: "plain", stopped: "bad", interrupted: "warn" };

export function sparkline(values, label) {
  // A small curve without axes; its name has the first and the last value.
  if (!values || values.length < 2) return "";
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const points = values.map((value, at) => `${(2 + 92 * at / (values.length - 1)).toFixed(1)},${(high === low ? 11 : 20 - 18 * (value - low) / (high - low)).toFixed(1)}`);
  return svg("svg", { class: "sparkline", viewBox: "0 0 96 22", width: 96, height: 22, role: "img", "aria-label": `${label}: from ${values[0].toPrecision(3)} to ${values.at(-1).toPrecision(3)}` },
    svg("polyline", { points: points.join(" ") }));
}

function percent(share) {
  return `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`;
}

function successCell(success) {
  if (!success || success.value === null) return "";
  const range = success.low === null ? "" : `${(100 * success.low).toFixed(0)}–${(100 * success.high).toFixed(0)} %`;
  return h("span", { title: `95 % interval over ${many(success.tasks, "task")}; ${many(success.episodes, "episode")} measured, without failures that are not the policy's` },
    h("b", {}, percent(success.value)), range ? h("span", { class: "dim" }, ` ${range}`) : null);
}

function outcomesCell(numbers) {
  const total = Math.max(1, numbers.episodes);
  const parts = Object.entries(numbers.outcomes).filter(([, count]) => count);
  const words = parts.map(([name, count]) => `${integer(count)} ${ENDS[name]}`).join(", ") || "none has ended";
  let at = 0;
  return h("span", { class: "outcomes", title: words }, svg("svg", { viewBox: "0 0 100 10", width: 100, height: 10, role: "img", "aria-label": words },
    svg("rect", { class: "rest", width: 100, height: 10 }),
    parts.map(([name, count]) => { const width = 100 * count / total; at += width; return svg("rect", { class: name, x: (at - width).toFixed(2), width: width.toFixed(2), height: 10 }); })));
}

const COLUMNS = [
  { key: "name", title: "name", always: true, of: (row) => row.name, cell: (row) => [h("a", { href: row.kind === "training" ? address("training", { training: row.key }) : address("list", { within: row.key }), class: "row-link" }, inline(row.name, 40)),
    row.kind === "run" ? null : h("span", { class: "badge" }, row.kind)] },
  { key: "status", title: "state", of: (row) => row.status, cell: (row, numbers) => h("span", { class: "badge " + STATES[numbers.status || row.status] }, numbers.status || row.status) },
  { key: "success", counted: true, title: "success", number: true, of: (row, numbers) => numbers.success?.value, cell: (row, numbers) => successCell(numbers.success) },
  { key: "reward", counted: true, title: "mean reward", number: true, of: (row, numbers) => numbers.reward, cell: (row, numbers) => (numbers.reward === null || numbers.reward === undefined ? "" : h("span", { class: tone(numbers.reward) }, signed(numbers.reward))) },
  { key: "episodes", counted: true, title: "episodes", number: true, of: (row, numbers) => numbers.done, cell: (row, numbers) => (numbers.episodes === undefined ? "" : h("a", { href: address("list", { within: row.key }) }, numbers.done === numbers.episodes ? integer(numbers.done) : `${integer(numbers.done)} of ${integer(numbers.episodes)}`)) },
  { key: "outcomes", title: "outcomes", cell: (row, numbers) => (numbers.outcomes ? outcomesCell(numbers) : "") },
  { key: "curve", title: "curve", cell: (row, numbers) => sparkline(numbers.curve, numbers.curve_of) },
  { key: "model", title: "model", of: (row) => row.model, cell: (row) => h("span", { title: row.model }, inline(row.model.split("/").slice(-2).join("/"), 32)) },
  { key: "spec", title: "spec", of: (row) => row.spec, cell: (row) => h("span", { title: row.spec }, inline(row.spec.split("/").at(-1), 32)) },
  { key: "cost", counted: true, title: "cost", number: true, of: (row, numbers) => numbers.cost, cell: (row, numbers) => (numbers.cost ? numbers.cost.toFixed(numbers.cost < 1 ? 4 : 2) : "") },
  { key: "created", title: "date", of: (row) => row.created, cell: (row) => h("time", { datetime: new Date(row.created * 1000).toISOString() }, new Date(row.created * 1000).toLocaleString()) },
  { key: "steps", counted: true, title: "steps", number: true, hidden: true, of: (row, numbers) => numbers.steps, cell: (row, numbers) => (numbers.steps === undefined ? "" : numbers.planned ? `${integer(numbers.steps)} of ${integer(numbers.planned)}` : integer(numbers.steps)) },
  { key: "seconds", counted: true, title: "time", number: true, hidden: true, of: (row, numbers) => numbers.seconds, cell: (row, numbers) => seconds(numbers.seconds) },
  { key: "backend", title: "backend", hidden: true, of: (row) => row.backend, cell: (row) => inline(row.backend, 24) },
  { key: "key", title: "id", hidden: true, of: (row) => row.key, cell: (row) => inline(row.key, 60) },
];

function fits(row, params) {
  const words = [row.name, row.key, row.spec, row.model, row.backend].join("\n").toLowerCase();
  return (params.find || "").toLowerCase().split(/\s+/).every((word) => words.includes(word))
    && (!params.state || row.status === params.state) && (!params.kind || row.kind === params.kind);
}

function inOrder(rows, column, descending, of) {
  return [...rows].sort((a, b) => {
    const [x, y] = [column.of(a, of(a)), column.of(b, of(b))];
    if (x === y) return 0;
    if (x === null || x === undefined) return 1;
    if (y === null || y === undefined) return -1;
    return (x < y ? -1 : 1) * (descending ? -1 : 1);
  });
}

export async function homePage(main, params) {
  const numbers = new Map();
  const of = (row) => numbers.get(row.key) || {};
  const place = h("div", {});
  let rows = await get("runs");
  let most = ROWS;
  let timer = null;
  let closed = false;
  const sort = params.sort ? COLUMNS.find((each) => each.key === params.sort && each.of) : null;

  const fetchNumbers = async (wanted) => {
    const waiting = wanted.filter((row) => !numbers.has(row.key) || row.status === "running");
    const work = async () => {
      for (let row = waiting.shift(); row && !closed; row = waiting.shift()) {
        numbers.set(row.key, await get("numbers", { key: row.key }).catch(() => ({})));
        fillRow(row);
      }
    };
    await Promise.all(Array.from({ length: AT_ONCE }, work));
  };
  const fillRow = (row) => {
    const at = place.querySelector(`tr[data-key="${CSS.escape(row.key)}"]`);
    if (!at) return;
    chosenColumns("home", COLUMNS).forEach((each, index) => put(at.children[index], each.cell(row, of(row))));
  };
  const draw = () => {
    const shownColumns = chosenColumns("home", COLUMNS);
    const found = rows.filter((row) => fits(row, params));
    const ordered = sort ? inOrder(found, sort, params.descending === "true", of) : found;
    const visible = ordered.slice(0, most);
    const heads = shownColumns.map((each) => {
      const on = sort === each;
      return { class: each.number ? "number" : "", text: each.of ? h("a", { href: address("home", { ...params, sort: each.key, descending: on && params.descending === "true" ? null : "true" }), "aria-label": `Sort by ${each.title}` + (on ? (params.descending === "true" ? ", now descending" : ", now ascending") : "") },
        each.title, on ? h("span", { "aria-hidden": "true" }, params.descending === "true" ? " ↓" : " ↑") : null) : each.title };
    });
    put(place,
      h("p", { class: "sum" }, `${found.length === rows.length ? "" : `${integer(found.length)} of `}${integer(rows.length)} runs and trainings`),
      visible.length ? table(heads, visible.map((row) => ({ props: { "data-key": row.key }, cells: shownColumns.map((each) => each.cell(row, of(row))) })), { caption: "Runs and trainings, newest first", class: "episodes home" })
        : h("p", { class: "empty" }, rows.length ? "No run matches." : "There are no runs yet: `engine run SPEC` makes one."),
      ordered.length > most ? button(`Show ${integer(Math.min(ROWS, ordered.length - most))} more`, () => { most += ROWS; draw(); fetchNumbers(visibleRows()); }) : null);
    return visible;
  };
  const visibleRows = () => rows.filter((row) => place.querySelector(`tr[data-key="${CSS.escape(row.key)}"]`));
  const choice = (name, label, values) => h("label", { class: "field" }, label, h("select", { name, onchange: (event) => go("home", { ...params, [name]: event.target.value }) },
    h("option", { value: "" }, "all"), values.map((each) => h("option", { value: each, selected: params[name] === each }, each))));
  const form = h("form", { role: "search", class: "search", onsubmit: (event) => { event.preventDefault(); go("home", { ...params, find: new FormData(event.target).get("find") }); } },
    h("label", { class: "field text" }, "Find", h("input", { name: "find", type: "search", value: params.find || "", placeholder: "name, spec, model or id", spellcheck: "false", autocomplete: "off" })),
    choice("state", "State", Object.keys(STATES)), choice("kind", "Kind", ["run", "evaluation", "training"]), h("button", { type: "submit" }, "Apply"),
    params.find || params.state || params.kind ? h("a", { href: address("home", { sort: params.sort, descending: params.descending }), class: "clear" }, "Clear") : null,
    h("span", { class: "grow" }), columnChoice("home", COLUMNS, () => draw()));
  put(main, h("h1", {}, "Runs"), form, place);
  draw();
  const start = async () => {
    // A sort by numbers needs those of all rows.
    await fetchNumbers(sort?.counted ? rows.filter((row) => fits(row, params)) : visibleRows());
    if (sort?.counted) draw();
  };
  const again = async () => {
    try {
      const before = rows.map((row) => row.key + row.status).join();
      rows = await get("runs");
      if (rows.map((row) => row.key + row.status).join() !== before) draw();
      await fetchNumbers(visibleRows());
    } catch { /* the server may have stopped */ }
    if (!closed) timer = setTimeout(again, LOOK_AGAIN);
  };
  const move = (by) => {
    const links = [...place.querySelectorAll(".row-link")];
    const at = links.indexOf(document.activeElement);
    links[Math.max(0, Math.min(links.length - 1, at < 0 ? 0 : at + by))]?.focus();
  };
  const keys = [
    ["j", "Next run", () => move(1)],
    ["k", "Previous run", () => move(-1)],
    ["Enter", "Open the run", () => (place.contains(document.activeElement) ? document.activeElement.click() : move(0))],
    ["/", "Find a run", () => form.querySelector("input[name=find]").focus()],
    ["c", "Compare runs", () => go("compare", {})],
  ];
  return { keys, title: "Runs", shown: () => { start(); timer = setTimeout(again, LOOK_AGAIN); }, close: () => { closed = true; clearTimeout(timer); } };
}
