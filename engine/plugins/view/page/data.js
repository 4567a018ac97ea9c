// Documents: from the server, or from the page itself where it is a file.

const embedded = document.getElementById("offline-data");
export const offline = embedded ? JSON.parse(embedded.textContent) : null;

export async function get(name, params = {}) {
  const given = Object.fromEntries(Object.entries(params).filter(([, value]) => value !== null && value !== undefined));
  if (offline) {
    if (name === "page") return offlinePage(given);
    if (name === "neighbours") return offlineNeighbours(given);
    const found = offline.documents[[name, ...Object.values(given)].join("\n")];
    if (found === undefined) throw new Error("This file does not hold that: it has a part of a run.");
    return found;
  }
  const answer = await fetch(`api/${name}?${new URLSearchParams(given)}`, { credentials: "same-origin" });
  const body = await answer.json().catch(() => ({ error: `${answer.status} ${answer.statusText}` }));
  if (!answer.ok) throw new Error(body.error || `${answer.status} ${answer.statusText}`);
  return body;
}

export async function post(name, body) {
  const answer = await fetch(`api/${name}`, { method: "POST", credentials: "same-origin", headers: { "content-type": "application/json" }, body: JSON.stringify(body) });
  const found = await answer.json().catch(() => ({ error: `${answer.status} ${answer.statusText}` }));
  if (!answer.ok) throw new Error(found.error);
  return found;
}

export function imageAddress(run, digest) {
  if (offline) return offline.images[digest] || null;
  return `api/image?${new URLSearchParams({ run, digest })}`;
}

const SORTS = {
  order: null,
  episode: (row) => row.episode,
  outcome: (row) => row.outcome,
  turns: (row) => row.turns.assistant,
  tokens: (row) => row.tokens.sampled,
  reward: (row) => row.reward,
  seconds: (row) => row.seconds,
  version: (row) => row.versions.at(-1),
};

function said(row) {
  // What was said in an episode, for the search.
  row.said ??= (offline.documents[["episode", row.run, row.episode].join("\n")]?.messages || [])
    .flatMap((message) => [message.reasoning || "", ...message.parts.map((part) => part.text || ""), ...message.calls.map((call) => `${call.name} ${JSON.stringify(call.arguments)}`)])
    .join("\n").toLowerCase();
  return row.said;
}

function offlineRows({ within, text, sort, descending }) {
  const wanted = (text || "").toLowerCase();
  const rows = offline.rows.filter((row) => (!within || row.run === within) && (!wanted || said(row).includes(wanted)));
  const of = sort && sort.startsWith("reward:") ? (row) => row.rewards[sort.slice(7)] : SORTS[sort || "order"];
  if (of) {
    const order = (a, b) => {
      const [x, y] = [of(a), of(b)];
      if (x === y) return 0;
      if (x === null || x === undefined) return 1;
      if (y === null || y === undefined) return -1;
      return (x < y ? -1 : 1) * (descending === "true" ? -1 : 1);
    };
    rows.sort(order);
  }
  return rows;
}

function offlineTexts(row, text) {
  const messages = offline.documents[["episode", row.run, row.episode].join("\n")]?.messages || [];
  const words = (message) => (message?.parts || []).map((part) => part.text || "").join("");
  const conversation = messages.map(words).join("\n");
  const at = text ? conversation.toLowerCase().indexOf(text.toLowerCase()) : -1;
  const end = at + (text || "").length;
  return { task: words(messages.find((each) => each.role === "user")), answer: words(messages.findLast((each) => each.role === "assistant")),
    hit: at < 0 ? null : [conversation.slice(Math.max(0, at - 60), at), conversation.slice(at, end), conversation.slice(end, end + 60)] };
}

function offlinePage(params) {
  const rows = offlineRows(params);
  const offset = Number(params.offset || 0);
  const page = rows.slice(offset, offset + Number(params.limit || 100));
  return { rows: page.map((row) => ({ ...row, texts: offlineTexts(row, params.text) })), total: rows.length, skipped: 0 };
}

function offlineNeighbours(params) {
  const rows = offlineRows(params);
  const at = rows.findIndex((row) => row.run === params.run && row.episode === params.episode);
  const pair = (row) => (row ? [row.run, row.episode] : null);
  return { previous: at > 0 ? pair(rows[at - 1]) : null, next: at >= 0 ? pair(rows[at + 1]) : null, position: at, total: rows.length };
}
