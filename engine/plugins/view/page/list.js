// The list of episodes: filter in CEL, text search, causes of failures, sorting, pages.

import { h, inline, integer, put, seconds, signed, table, tone } from "./dom.js";
import { get, offline } from "./data.js";
import { address, go, listParams } from "./route.js";
import { reviewCells } from "./review.js";

const PAGE = 100;
const REFRESH = 4000;

function columns(names, several, params) {
  // [title, sort key, class]
  return [
    ...(several ? [["run", "run", ""]] : []),
    ["episode", "episode", ""],
    ["task", "task", ""],
    ["outcome", "outcome", ""],
    ["turns", "turns", "number"],
    ["tokens", "tokens", "number"],
    ["reward", "reward", "number"],
    ...names.map((name) => [name, `reward:${name}`, "number"]),
    ["limit or failure", "failure", ""],
    ["time", "seconds", "number"],
    ["version", "version", "number"],
    ...(params.steps ? [["step", "step", "number"]] : []),
    ...(params.reviewed ? [["rating", null, "number"], ["tags", null, ""]] : []),
  ];
}

function versions(row) {
  const [first, last] = row.versions;
  return first === undefined ? "" : first === last ? String(last) : `${first}–${last}`;
}

export function badge(row) {
  const kind = row.failure ? "bad" : row.limit ? "warn" : row.solved ? "good" : row.status === "done" ? "plain" : "going";
  const text = row.status === "done" ? row.outcome : row.state ? `${row.status}: ${row.state}` : row.status;
  return h("span", { class: "badge " + kind }, inline(text, 60));
}

function cells(row, names, several, withSteps, params) {
  const link = address("episode", { run: row.run, id: row.episode, ...listParams(params) });
  const done = row.status === "done";
  const why = row.failure ? `${row.failure} (${row.blame})` : row.limit || "";
  return [
    ...(several ? [inline(row.run, 32)] : []),
    h("a", { href: link, class: "row-link" }, inline(row.episode, 48)),
    h("a", { href: address("group", { run: row.run, task: row.task }), title: "Samples of this task side by side" }, inline(row.task, 32)),
    badge(row),
    integer(row.turns.assistant),
    integer(row.tokens.sampled),
    done ? h("span", { class: "reward " + tone(row.reward) }, signed(row.reward)) : "",
    ...names.map((name) => (name in row.rewards ? h("span", { class: tone(row.rewards[name]) }, signed(row.rewards[name])) : "")),
    h("span", { title: row.message || "" }, inline(why, 48)),
    seconds(row.seconds),
    versions(row),
    ...(withSteps ? [row.step ?? ""] : []),
    ...(params.reviewed ? reviewCells(row.review) : []),
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

function causeList(causes, params) {
  if (!causes.length) return null;
  return h("section", { class: "causes", "aria-labelledby": "causes-title" },
    h("h2", { id: "causes-title" }, "Failures and limits"),
    h("ul", {}, causes.map((cause) => {
      const name = cause.failure ? `${cause.failure} (${cause.blame})` : `limit: ${cause.limit}`;
      return h("li", {},
        h("a", { href: address("list", { ...params, filter: cause.filter, page: null }), title: cause.message || "" },
          h("span", { class: "badge " + (cause.failure ? "bad" : "warn") }, inline(name, 60)),
          h("b", {}, integer(cause.count)), ` ${(cause.share * 100).toFixed(cause.share < 0.1 ? 1 : 0)} %`));
    })));
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
  const causes = h("div", {});
  const totals = h("span", {}, "\u00a0");
  let timer = null;

  const place = h("div", { class: "list-body" });
  const form = search(params);
  put(main, params.within ? h("nav", { class: "crumbs", "aria-label": "Position" }, h("a", { href: address("home") }, "Runs"), " / ",
    sources.trainings.includes(params.within) ? h("a", { href: address("training", { training: params.within }) }, "training") : "run") : null,
  h("h1", {}, params.within ? inline(params.within, 80) : "Episodes"), form, place);

  const draw = async () => {
    const page = await get("page", ask);
    const found = [...new Set(page.rows.flatMap((row) => Object.keys(row.rewards)))].sort();
    const names = found.length > 1 ? found : [];
    const rows = page.rows;
    const reviewed = rows.some((row) => row.review?.by.length);
    const shape = columns(names, several, { steps: withSteps, reviewed });
    const pages = Math.ceil(page.total / PAGE);
    const heads = shape.map(([title, key, kind]) => {
      if (key === null) return { class: kind, text: title };
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
      causes, h("p", { class: "sum" }, totals, skipped),
      pager,
      rows.length ? table(heads, rows.map((row) => ({ cells: cells(row, names, several, withSteps, { ...params, reviewed }) })), { caption: "Episodes", class: "episodes" })
        : h("p", { class: "empty" }, params.filter || params.text ? "No episode matches." : "There are no episodes yet."),
      pager ? pager.cloneNode(true) : null,
      rows.length ? actions(params) : null,
    ];
    place.replaceChildren(...parts.filter(Boolean));
    if (offline) totals.textContent = sum(offline.totals);
    else {
      get("totals", query).then((each) => { totals.textContent = sum(each); }).catch(() => {});
      get("causes", query).then((each) => causes.replaceChildren(...[causeList(each, params)].filter(Boolean))).catch(() => {});
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
