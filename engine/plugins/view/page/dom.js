// Elements, and the display of text and numbers. Text of models and tasks becomes text nodes only, never HTML.

const SVG = "http://www.w3.org/2000/svg";
// Characters that would be invisible, or would change the order of the text around them.
const HIDDEN = /[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f\u061c\u200b\u200e\u200f\u202a-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb]/g;
const READ = new Set(["title", "alt", "aria-label", "placeholder"]);
const MOST_CHARACTERS = 20000;

function code(character) {
  return "U+" + character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
}

function visible(text) {
  return text.replace(HIDDEN, code);
}

function fill(element, props, children) {
  for (const [name, value] of Object.entries(props || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, each] of Object.entries(value)) element.style.setProperty(key, each);
    else element.setAttribute(name, value === true ? "" : READ.has(name) ? visible(String(value)) : String(value));
  }
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    if (child instanceof Node) element.append(child);
    else element.append(element.namespaceURI === SVG ? visible(String(child)) : shown(String(child)));
  }
  return element;
}

export function h(tag, props, ...children) {
  return fill(document.createElement(tag), props, children);
}

export function svg(tag, props, ...children) {
  return fill(document.createElementNS(SVG, tag), props, children);
}

export function shown(text) {
  // Text with hidden characters made visible.
  const fragment = document.createDocumentFragment();
  let at = 0;
  for (const match of text.matchAll(HIDDEN)) {
    fragment.append(text.slice(at, match.index));
    fragment.append(h("span", { class: "hidden-character" }, code(match[0])));
    at = match.index + match[0].length;
  }
  fragment.append(text.slice(at));
  return fragment;
}

export function prose(text, kind = "") {
  // A block of text that keeps its lines; a very long one is shown in part until it is asked for.
  const block = h("div", { class: "prose " + kind, dir: "auto" });
  if (text.length <= MOST_CHARACTERS) {
    block.append(shown(text));
    return block;
  }
  block.append(shown(text.slice(0, MOST_CHARACTERS)));
  const more = h("button", { type: "button", class: "more" }, `Show all ${integer(text.length)} characters`);
  more.addEventListener("click", () => block.replaceChildren(shown(text)));
  block.append(h("div", {}, more));
  return block;
}

export function inline(text, most = 120) {
  const line = text.replace(/\s+/g, " ").trim();
  return h("bdi", {}, shown(line.length > most ? line.slice(0, most - 1) + "…" : line));
}

export function valueText(value) {
  return typeof value === "string" ? value : JSON.stringify(value, null, 1);
}

export function integer(value) {
  return value === null || value === undefined ? "" : Number(value).toLocaleString("en-US");
}

export function signed(value, digits = 3) {
  if (value === null || value === undefined) return "";
  const number = Number(value);
  if (!Number.isFinite(number)) return String(value);
  const size = Math.abs(number).toFixed(digits);
  return (Number(size) === 0 ? "" : number < 0 ? "−" : "+") + size;
}

export function seconds(value) {
  if (value === null || value === undefined) return "";
  if (value >= 120) return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
  if (value >= 10) return value.toFixed(1) + " s";
  if (value >= 0.1) return value.toFixed(2) + " s";
  return (value * 1000).toFixed(value >= 0.01 ? 0 : 2) + " ms";
}

export function tone(value) {
  return value > 1e-9 ? "good" : value < -1e-9 ? "bad" : "none";
}

export function many(count, thing) {
  return `${integer(count)} ${thing}${count === 1 ? "" : "s"}`;
}

export function reward(value, name = "") {
  return h("span", { class: "reward " + tone(value) }, name ? `${name} ` : "", signed(value));
}

export function table(head, rows, props = {}) {
  // head: texts, or {text, class}. rows: arrays of cells, or {cells, props}.
  const columns = head.map((each) => (typeof each === "string" ? { text: each } : each));
  const body = rows.map((row) => {
    const { cells, props: own } = Array.isArray(row) ? { cells: row, props: {} } : row;
    return h("tr", own, cells.map((cell, at) => h(at === 0 && props.rowheads ? "th" : "td",
      { class: columns[at].class, scope: at === 0 && props.rowheads ? "row" : null }, cell)));
  });
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": props.caption || "table" },
    h("table", { class: props.class },
      props.caption ? h("caption", {}, props.caption) : null,
      h("thead", {}, h("tr", {}, columns.map((each) => h("th", { scope: "col", class: each.class }, each.text)))),
      h("tbody", {}, body)));
}

export function announce(text) {
  document.getElementById("live").textContent = text;
}

export function button(text, action, props = {}) {
  return h("button", { type: "button", onclick: action, ...props }, text);
}

export function put(place, ...children) {
  // Replace the content of an element; null and false are left out.
  place.replaceChildren(...children.flat(Infinity).filter((each) => each !== null && each !== undefined && each !== false));
}
