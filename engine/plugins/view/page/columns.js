// Which columns a table shows: a choice that the browser remembers, for each kind of table.

import { h } from "./dom.js";

export function kept(name, otherwise) {
  try { return JSON.parse(localStorage.getItem(`engine-view-${name}`)) ?? otherwise; } catch { return otherwise; }
}

export function keep(name, value) {
  try { localStorage.setItem(`engine-view-${name}`, JSON.stringify(value)); } catch { /* a file may have no storage */ }
}

export function chosenColumns(table, columns) {
  // Those of the columns ({ key, title, hidden: not shown unless it is chosen }) that are shown.
  const choice = kept(`columns-${table}`, {});
  return columns.filter((each) => choice[each.key] ?? !each.hidden);
}

export function columnChoice(table, columns, changed) {
  // A menu of all columns; `changed` is called after each change.
  const shown = new Set(chosenColumns(table, columns).map((each) => each.key));
  const choose = (key, on) => { keep(`columns-${table}`, { ...kept(`columns-${table}`, {}), [key]: on }); changed(); };
  return h("details", { class: "column-choice" }, h("summary", {}, "Columns"),
    h("fieldset", {}, h("legend", {}, "Show"), columns.filter((each) => !each.always).map((each) => h("label", {},
      h("input", { type: "checkbox", name: each.key, checked: shown.has(each.key), onchange: (event) => choose(each.key, event.target.checked) }), each.title))));
}
