// The address: `#/page?name=value`. Every view of an episode, a turn and a token has one.

export function here() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  return { page: path, params: Object.fromEntries(new URLSearchParams(query)) };
}

export function address(page, params = {}) {
  const given = Object.entries(params).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const query = new URLSearchParams(given.map(([name, value]) => [name, String(value)])).toString();
  return `#/${page}${query ? "?" + query : ""}`;
}

export function go(page, params, replace = false) {
  const target = address(page, params);
  if (location.hash === target) return;
  if (replace) {
    history.replaceState(null, "", target);
    dispatchEvent(new HashChangeEvent("hashchange"));
  } else location.hash = target;
}

const LIST = ["within", "filter", "text", "sort", "descending"];

export function listParams(params) {
  // What an episode's address keeps of the list that it was opened from.
  return Object.fromEntries(LIST.filter((name) => params[name]).map((name) => [name, params[name]]));
}
