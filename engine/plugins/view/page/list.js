// The list of episodes: filter in CEL, text search, charts, columns, sorting, pages.

import { h, inline, integer, put, seconds, shown, signed, table, tone } from "./dom.js";
import { get, offline } from "./data.js";
import { address, go, listParams } from "./route.js";
import { chartRow } from "./charts.js";
import { reviewCells } from "./review.js";
import { chosenColumns, columnChoice } from "./columns.js";

const PAGE = 100;
const REFRESH = 4000;
const MOST_NAMES = 3;

function versions(row) {
  const [first, last] = row.versions;
  return first === undefined ? "" : first === last ? String(last) : `${first}–${last}`;
}

export function badge(row) {
  const kind = row.failure ? "bad" : row.limit ? "warn" : row.solved ? "good" : row.status === "done" ? "plain" : "going";
  const text = row.status === "done" ? row.outcome : row.state ? `${row.status}: ${row.state}` : row.status;
  return h("span", { class: "badge " + kind }, inline(text, 60));
}

function hit(text) {
  return text ? h("span", { class: "said" }, "…", shown(text[0]), h("mark", {}, shown(text[1])), shown(text[2]), "…") : null;
}

function columns(names, several, { steps, reviewed }, params) {
  // Reward and outcome stand first: on a narrow page the others are reached by scrolling.
  const link = (row) => address("episode", { run: row.run, id: row.episode, ...listParams(params) });
  return [
    { key: "reward", title: "reward", number: true, always: true, cell: (row) => (row.status === "done" ? h("span", { class: "reward " + tone(row.reward) }, signed(row.reward)) : "") },
    { key: "outcome", title: "outcome", always: true, cell: badge },
    { key: "episode", title: "episode", always: true, cell: (row) => h("a", { href: link(row), class: "row-link" }, inline(row.episode, 48)) },
    { key: "task", title: "task", cell: (row) => [h("a", { href: address("group", { run: row.run, task: row.task }), title: "Samples of this task side by side" }, inline(row.task, 32)), h("span", { class: "said" }, inline(row.texts.task, 160))] },
    { key: "answer", title: "last answer", unsorted: true, cell: (row) => [h("span", { class: "said" }, inline(row.texts.answer, 160)), hit(row.texts.hit)] },
    { key: "turns", title: "turns", number: true, cell: (row) => integer(row.turns.assistant) },
    { key: "tokens", title: "tokens", number: true, cell: (row) => integer(row.tokens.sampled) },
    ...names.map((name) => ({ key: `reward:${name}`, title: name, number: true, hidden: names.length > MOST_NAMES, cell: (row) => (name in row.rewards ? h("span", { class: tone(row.rewards[name]) }, signed(row.rewards[name])) : "") })),
    { key: "failure", title: "limit or failure", hidden: true, cell: (row) => h("span", { title: row.message || "" }, inline(row.failure ? `${row.failure} (${row.blame})` : row.limit || "", 48)) },
    { key: "seconds", title: "time", number: true, cell: (row) => seconds(row.seconds) },
    { key: "version", title: "version", number: true, cell: versions },
    ...(steps ? [{ key: "step", title: "step", number: true, cell: (row) => row.step ?? "" }] : []),
    { key: "cost", title: "cost", number: true, hidden: true, cell: (row) => (row.cost ? row.cost.toFixed(4) : "") },
    ...(reviewed ? ["rating", "tags"].map((key, at) => ({ key, title: key, unsorted: true, number: key === "rating", cell: (row) => reviewCells(row.review)[at] })) : []),
    ...(several ? [{ key: "run", title: "run", cell: (row) => inline(row.run, 32) }] : []),
  ];
}

function search(params) {
  const field = (name, label, placeholder, hint) => h("label", { class: "field " + name }, label,
    h("input", { name, type: "search", value: params[name] || "", placeholder, spellcheck: "false", autocomplete: "off", "aria-description": hint }));
  return h("form", { role: "search", class: "search", onsubmit: (event) => {
    event.preventDefault();
    const given = new FormData(event.target);
    go("list", { ...params, filter: given.get("filter"), text: given.get("text"), page: null });
  } },
  offline ? null : field("filter", "Filter", 'outcome.reward < 0.5 && turns.assistant > 3', "An expression in CEL"),
  field("text", "Said", "text in a message", "Text that was said in the episode"),
  h("button", { type: "submit" }, "Apply"),
  params.filter || params.text ? h("a", { href: address("list", { within: params.within, sort: params.sort, descending: params.descending }), class: "clear" }, "Clear") : null);
}

function sum(totals) {
  const parts = [`${integer(totals.done)} of ${integer(totals.episodes)} episodes done`];
  if (totals.reward !== null && totals.reward !== undefined) parts.push(`mean reward ${totals.reward.toFixed(3)}`);
  if (totals.chosen) parts.push(totals.chosen);
  parts.push(`${integer(totals.solved)} solved`, `${integer(totals.failed)} failed`, `${integer(totals.limited)} ended by a limit`);
  return parts.join(" · ");
}

export async function listPage(main, params, sources) {
  const number = Number(params.page || 0);
  const query = { within: params.within, filter: params.filter, text: params.text };
  const scope = sources.sources.filter((each) => !params.within || each.key === params.within || each.training?.split("/").at(-1) === params.within);
  const ask = { ...query, sort: params.sort || "order", descending: params.descending === "true", offset: number * PAGE, limit: PAGE };
  const several = scope.length > 1;
  const withSteps = scope.some((each) => each.training);
  const charts = h("div", { class: "charts-place" });
  const totals = h("span", {}, "\u00a0");
  let timer = null;

  const place = h("div", { class: "list-body" });
  const form = search(params);
  put(main, params.within ? h("nav", { class: "crumbs", "aria-label": "Position" }, h("a", { href: address("home") }, "Runs"), " / ",
    sources.trainings.includes(params.within) ? h("a", { href: address("training", { training: params.within }) }, "training") : "run") : null,
  h("h1", {}, params.within ? inline(params.within, 80) : "Episodes"), form, charts, place);

  const draw = async () => {
    const page = await get("page", ask);
    const found = [...new Set(page.rows.flatMap((row) => Object.keys(row.rewards)))].sort();
    const names = found.length > 1 ? found : [];
    const reviewed = page.rows.some((row) => row.review?.by.length);
    const all = columns(names, several, { steps: withSteps, reviewed }, params);
    const shape = chosenColumns("list", all);
    const choice = columnChoice("list", all, () => draw());
    choice.open = place.querySelector(".column-choice")?.open || false;
    const rows = page.rows;
    const pages = Math.ceil(page.total / PAGE);
    const heads = shape.map(({ title, key, number: isNumber, unsorted }) => {
      const kind = isNumber ? "number" : "";
      if (unsorted) return { class: kind, text: title };
      const on = ask.sort === key;
      const next = on && !ask.descending ? "true" : null;
      return { class: kind, text: h("a", { href: address("list", { ...params, sort: key, descending: next, page: null }),
        "aria-label": `Sort by ${title}` + (on ? (ask.descending ? ", now descending" : ", now ascending") : "") },
      title, on ? h("span", { "aria-hidden": "true" }, ask.descending ? " ↓" : " ↑") : null) };
    });
    const pager = pages > 1 ? h("nav", { class: "pager", "aria-label": "Pages of the list" },
      number > 0 ? h("a", { href: address("list", { ...params, page: number - 1 || null }), rel: "prev" }, "← previous") : h("span", {}, "← previous"),
      h("span", {}, `${integer(number * PAGE + 1)}–${integer(Math.min(page.total, (number + 1) * PAGE))} of ${integer(page.total)}`),
      number + 1 < pages ? h("a", { href: address("list", { ...params, page: number + 1 }), rel: "next" }, "next →") : h("span", {}, "next →")) : null;
    const focused = document.activeElement && place.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
    const skipped = page.skipped ? ` · ${integer(page.skipped)} without a value for the filter: ${page.skipped_because}` : "";
    const parts = [
      h("div", { class: "list-head" }, h("p", { class: "sum" }, totals, skipped), h("span", { class: "grow" }), choice),
      pager,
      rows.length ? table(heads, rows.map((row) => ({ cells: shape.map((each) => each.cell(row)) })), { caption: "Episodes", class: "episodes" })
        : h("p", { class: "empty" }, params.filter || params.text ? "No episode matches." : "There are no episodes yet."),
      pager ? pager.cloneNode(true) : null,
      rows.length ? actions(params) : null,
    ];
    place.replaceChildren(...parts.filter(Boolean));
    if (offline) totals.textContent = sum(offline.totals);
    else {
      get("totals", query).then((each) => { totals.textContent = sum(each); }).catch(() => {});
      get("charts", query).then((each) => charts.replaceChildren(chartRow(each, params))).catch(() => {});
    }
    if (focused) [...place.querySelectorAll("a")].find((each) => each.getAttribute("href") === focused)?.focus();
  };

  const again = async () => {
    try { await draw(); } catch { /* the server may have stopped */ }
    if (timer !== null) timer = setTimeout(again, REFRESH);
  };
  try {
    await draw();
  } catch (error) {
    place.replaceChildren(h("p", { class: "error", role: "alert" }, error.message));
  }
  if (!offline && scope.some((source) => source.status === "running")) timer = setTimeout(again, REFRESH);

  const move = (by) => {
    const links = [...place.querySelectorAll(".row-link")];
    const at = links.indexOf(document.activeElement);
    links[Math.max(0, Math.min(links.length - 1, at < 0 ? 0 : at + by))]?.focus();
  };
  const keys = [
    ["j", "Next episode", () => move(1)],
    ["k", "Previous episode", () => move(-1)],
    ["Enter", "Open the episode", () => (place.contains(document.activeElement) ? document.activeElement.click() : move(0))],
    ["n", "Next page", () => place.querySelector("a[rel=next]")?.click()],
    ["p", "Previous page", () => place.querySelector("a[rel=prev]")?.click()],
    ["f", "Filter", () => form.querySelector("input[name=filter]")?.focus()],
    ["/", "Search what was said", () => form.querySelector("input[name=text]").focus()],
    ...(sources.sources.length > 1 ? [["c", "Compare runs", () => go("compare", {})]] : []),
    ...(offline ? [] : [["u Escape", "Back to the runs", () => go("home", {})]]),
  ];
  return { keys, title: params.within || "Episodes", close: () => { clearTimeout(timer); timer = null; } };
}

function actions(params) {
  if (offline) return null;
  const query = new URLSearchParams(Object.entries({ within: params.within, filter: params.filter, text: params.text }).filter(([, value]) => value));
  return h("p", { class: "actions" }, h("a", { href: `api/rows?${query}`, download: "rows.jsonl", class: "button" }, "Download the training rows of these episodes (JSON lines)"));
}
