// Two runs, paired by task: what got better and worse, and how their specs differ.

import { h, inline, integer, many, put, signed, table, tone, valueText } from "./dom.js";
import { get } from "./data.js";
import { address, go } from "./route.js";

const JUDGED = /^(success|reward|pass)/;

function measures(found) {
  const fixed = (value) => (value === null ? "" : value.toFixed(3));
  const rows = found.measures.map((each) => [each.name.replace(/_/g, " "), fixed(each.first), fixed(each.second),
    h("span", { class: JUDGED.test(each.name) ? tone(each.difference) : "none" }, signed(each.difference)), each.low === null ? "" : `${signed(each.low)} to ${signed(each.high)}`]);
  const number = (text) => ({ text, class: "number" });
  return table(["measure", number("first"), number("second"), number("difference"), number("95 % interval")], rows, { caption: "Measures, paired by task", rowheads: true });
}

function pairTable(found, pairs, title) {
  if (!pairs.length) return h("p", { class: "empty" }, `${title}: no task`);
  const number = (text) => ({ text, class: "number" });
  const link = (run, task, side) => h("a", { href: address("group", { run, task }) }, many(side.episodes, "sample"));
  const solved = (side) => `${(100 * side.solved).toFixed(0)} %`;
  return table(["task", number("first reward"), number("second reward"), number("change"), number("first solved"), number("second solved"), "first run", "second run"],
    pairs.map((each) => [inline(each.task, 60), signed(each.first.reward), signed(each.second.reward), h("span", { class: tone(each.difference) }, signed(each.difference)),
      solved(each.first), solved(each.second), link(found.first, each.task, each.first), link(found.second, each.task, each.second)]),
    { caption: `${title}: ${many(pairs.length, "task")}`, rowheads: true });
}

function leftOut(found) {
  const parts = [[found.only_first, "tasks only in the first"], [found.only_second, "tasks only in the second"], [found.changed.length, "tasks not the same in both"],
    [found.masked[0] + found.masked[1], "episodes with a failure that is not the policy's"]];
  return parts.filter(([count]) => count).map(([count, what]) => ` · ${integer(count)} ${what}`).join("");
}

export async function comparePage(main, params, sources) {
  const names = sources.sources.map((each) => each.key);
  const [first, second] = [params.first || names[0], params.second || names.find((each) => each !== (params.first || names[0])) || names[0]];
  const choice = (name, value) => h("label", { class: "field" }, name === "first" ? "First run" : "Second run",
    h("select", { name, onchange: (event) => go("compare", { first, second, [name]: event.target.value }) }, names.map((key) => h("option", { value: key, selected: key === value }, key))));
  const place = h("div", {});
  put(main, h("h1", {}, "Compare two runs"), h("form", { class: "search" }, choice("first", first), choice("second", second)), place);
  const keys = [["u Escape", "Back to the list", () => go("list", {})]];
  const found = await get("compare", { first, second });
  const spec = found.spec.map((each) => [inline(each.path, 80), each.first === null ? "–" : inline(valueText(each.first), 240), each.second === null ? "–" : inline(valueText(each.second), 240)]);
  const verdict = (word) => found.tasks.filter((each) => each.verdict === word);
  put(place,
    h("p", { class: "facts-line" }, h("span", { class: "badge good" }, `${many(found.counts.better, "task")} better`), h("span", { class: "badge bad" }, `${found.counts.worse} worse`),
      h("span", { class: "badge" }, `${found.counts.same} the same`), h("span", { class: "dim" }, `${many(found.tasks.length, "task")} paired${leftOut(found)}`), found.warning ? h("span", { class: "warn" }, found.warning) : null),
    found.nothing ? h("p", { class: "why warn" }, `Nothing can be compared: ${found.nothing}.`) : null,
    spec.length ? table(["key", "first", "second"], spec, { caption: "Differences of the specs", rowheads: true }) : h("p", { class: "empty" }, "The specs are the same."),
    found.nothing ? null : [pairTable(found, verdict("worse"), "Worse"), pairTable(found, verdict("better").reverse(), "Better"), measures(found)]);
  return { keys, title: "Compare two runs" };
}
