// What people say about an episode: a rating, tags and a note. The server stores them; a page that is a file shows them.

import { announce, button, h, inline, put, table } from "./dom.js";
import { offline, post } from "./data.js";
import { address } from "./route.js";

function ratingText(value) {
  return value === null || value === undefined ? "" : (value > 0 ? "+" : "") + String(value).replace("-", "−");
}

export function reviewCells(review) {
  // The rating and the tags of a row of a list; a click on a tag shows the episodes that have it.
  const tag = (name) => h("a", { href: address("list", { filter: `"${name}" in facts.review.tags` }), title: "Episodes with this tag" }, inline(name, 30));
  return [review?.rated ? ratingText(review.rating) : "", (review?.tags || []).flatMap((name) => [tag(name), " "])];
}

export function mayReview(episode, reviewer) {
  return !offline && Boolean(reviewer) && episode.finished;
}

export async function review(episode, reviewer, change) {
  // Store what the person at this page says now, beside what they have said; the episode gets the new reviews.
  const before = episode.reviews.find((each) => each.by === reviewer) || { rating: null, tags: [], note: "" };
  const said = { rating: before.rating, tags: before.tags, note: before.note, ...change };
  episode.reviews = await post("review", { run: episode.run_key, id: episode.episode, ...said });
  announce(said.rating === null ? "Stored, not rated" : `Stored, rated ${ratingText(said.rating)}`);
}

export function reviewPanel(episode, params, open, reviewer) {
  const place = h("div", { class: "review" });
  const problem = h("p", { class: "error", role: "alert" });
  const draw = () => {
    const others = episode.reviews.map((each) => [inline(each.by, 40), ratingText(each.rating), inline(each.tags.join(" "), 80), h("bdi", {}, each.note)]);
    put(place, others.length ? table(["by", { text: "rating", class: "number" }, "tags", "note"], others, { caption: "Reviews", rowheads: true })
      : h("p", { class: "empty" }, "Nobody has reviewed this episode."),
    mayReview(episode, reviewer) ? form() : null, problem);
  };
  const store = async (change) => {
    try {
      problem.textContent = "";
      await review(episode, reviewer, change);
      draw();
    } catch (error) {
      problem.textContent = error.message;
    }
  };
  const form = () => {
    const own = episode.reviews.find((each) => each.by === reviewer) || { rating: null, tags: [], note: "" };
    const rate = (value, text, key) => button([text, key ? h("kbd", { "aria-hidden": "true" }, key) : null], () => store({ rating: value }), { "aria-pressed": String(own.rating === value) });
    return h("form", { class: "review-form", "aria-label": "Your review", onsubmit: (event) => {
      event.preventDefault();
      const given = new FormData(event.target);
      store({ tags: given.get("tags").split(/[\s,]+/).filter(Boolean), note: given.get("note").trim() });
    } },
    h("p", { role: "group", "aria-label": "Rating" }, rate(1, "Good", "+"), " ", rate(-1, "Bad", "-"), " ", rate(null, "Not rated")),
    h("label", { class: "field" }, "Tags", h("input", { name: "tags", value: own.tags.join(" "), placeholder: "words, with a space between them", autocomplete: "off" })),
    h("label", { class: "field" }, "Note", h("textarea", { name: "note", rows: "4", dir: "auto" }, own.note)),
    h("p", {}, h("button", { type: "submit" }, "Store tags and note"), " ", h("span", { class: "dim" }, `as ${reviewer}`)));
  };
  draw();
  return place;
}
