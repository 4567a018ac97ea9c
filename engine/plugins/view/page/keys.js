// The keyboard: one table of keys a page, and a help that shows it.

import { h } from "./dom.js";

let bindings = [];
const COMMON = [
  ["?", "Show this help", () => showKeys()],
  ["l", "List of episodes", () => { location.hash = "#/list"; }],
];

export function setKeys(own) {
  bindings = [...own, ...COMMON];
}

function typing(target) {
  return target.closest && target.closest("input, textarea, select, [contenteditable]");
}

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (typing(event.target)) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  if (document.querySelector("dialog[open]")) return;
  if (["Enter", " "].includes(event.key) && event.target.closest?.("a[href], button, summary, [role=button]")) return; // the control's own key
  const found = bindings.find(([key]) => key.split(" ").includes(event.key));
  if (!found || event.defaultPrevented) return;
  event.preventDefault();
  found[2](event);
});

export function showKeys() {
  const dialog = h("dialog", { class: "keys", "aria-labelledby": "keys-title" },
    h("h2", { id: "keys-title" }, "Keys"),
    h("dl", {}, bindings.map(([key, what]) => [
      h("dt", {}, key.split(" ").map((each) => h("kbd", {}, each))), h("dd", {}, what)])),
    h("form", { method: "dialog" }, h("button", { autofocus: true }, "Close")));
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}
