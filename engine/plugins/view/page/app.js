// The frame: header, theme, and the page that the address names.

import { announce, button, h } from "./dom.js";
import { get, offline } from "./data.js";
import { address, here } from "./route.js";
import { setKeys, showKeys } from "./keys.js";
import { homePage } from "./home.js";
import { kept, keep } from "./columns.js";
import { listPage } from "./list.js";
import { episodePage } from "./episode.js";
import { groupPage } from "./group.js";
import { comparePage } from "./compare.js";
import { trainingPage } from "./training.js";

const PAGES = { home: homePage, list: listPage, episode: episodePage, group: groupPage, compare: comparePage, training: trainingPage };
const THEMES = ["auto", "light", "dark"];
let shownPage = null;
let sources = null;

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  keep("theme", theme);
}

function opening() {
  // The page of an address that names none: the runs, or the episodes of the only run.
  return !offline && (sources.sources.length !== 1 || sources.trainings.length) ? "home" : "list";
}

function header(page) {
  const link = (name, text, params) => h("a", { href: address(name, params), "aria-current": page === name ? "page" : null }, text);
  const links = [offline ? null : link("home", "Runs"), link("list", "Episodes")];
  if (sources.sources.length > 1) links.push(link("compare", "Compare"));
  if (sources.trainings.length) links.push(link("training", "Training"));
  const theme = h("select", { "aria-label": "Colours", onchange: (event) => setTheme(event.target.value) },
    THEMES.map((each) => h("option", { value: each, selected: each === kept("theme", "auto") }, each)));
  document.getElementById("top").replaceChildren(...[
    h("span", { class: "brand" }, h("bdi", {}, sources.title)),
    h("nav", { "aria-label": "Pages" }, links),
    h("span", { class: "grow" }),
    sources.note ? h("span", { class: "note" }, sources.note) : null,
    theme,
    button("?", showKeys, { "aria-label": "Keys", title: "Keys (?)" })].filter(Boolean));
}

let asked = 0;

async function show() {
  // An address may change while a page is being made: only the newest one is shown.
  const own = ++asked;
  const { page: given, params } = here();
  let page = given || (sources ? opening() : "");
  const main = document.getElementById("main");
  const address_ = location.hash;
  try {
    if (shownPage && shownPage.page === page && shownPage.update && shownPage.update(params)) return;
    main.setAttribute("aria-busy", "true");
    const found = sources && offline ? sources : await get("sources");
    if (own !== asked) return;
    sources = found;
    page ||= opening();
    header(page);
    const make = PAGES[page];
    if (!make) throw new Error(`There is no page “${page}”.`);
    const place = h("div", {});
    const made = await make(place, params, sources);
    if (own !== asked) { made.close?.(); return; }
    const shownBefore = shownPage !== null;
    shownPage?.close?.();
    shownPage = { page, ...made };
    main.replaceChildren(place);
    if (shownBefore && document.activeElement === document.body) main.focus({ preventScroll: true }); // what had the focus is gone
    setKeys(made.keys);
    made.shown?.();
    document.title = shownPage.title;
    announce(shownPage.title);
  } catch (error) {
    if (own !== asked) return;
    shownPage?.close?.();
    shownPage = null;
    setKeys([]);
    main.replaceChildren(h("section", { class: "error", role: "alert" }, h("h1", {}, "This cannot be shown"), h("p", {}, error.message)));
  } finally {
    if (own === asked) {
      main.removeAttribute("aria-busy");
      main.dataset.shown = address_; // what the page shows, for tests
    }
  }
}

setTheme(kept("theme", "auto"));
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // its address would be that of a page
  document.getElementById("main").focus();
});
addEventListener("hashchange", show);
show();
