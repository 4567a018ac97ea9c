"""One HTML file with chosen episodes, which needs neither a server nor a network: the same pages, with the documents inside.

Invariants:
- The file asks for nothing: its Content-Security-Policy allows only the script and the styles inside it, and images inside it.
- Nothing is left out silently: what does not fit into the size is named in the file and in the result.
"""

from __future__ import annotations

import base64
import hashlib
import html
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from engine.errors import EngineError, StoreError
from engine.plugins.show.listing.listing import Listing
from engine.plugins.show.listing.rows import Row
from engine.plugins.view import assets
from engine.plugins.view.documents import Documents
from engine.store.private import whole_file

_ESCAPES = ((b"<", b"\\u003c"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"))
"""Characters that would end the element that holds the data, or a line of a script, and their escapes in JSON."""


@dataclass(slots=True)
class Written:
    """What a file holds."""

    chosen: int
    """Number of episodes that the filter chose."""
    episodes: int = 0
    """Number of episodes in the file."""
    bytes: int = 0
    """Size of the file."""
    left_out: list[str] = field(default_factory=list)
    """What is not in it, in words."""


@dataclass(slots=True)
class _Contents:
    """The parts of the file, as JSON."""

    room: int
    """Bytes that are left."""
    documents: dict[str, bytes] = field(default_factory=dict)
    images: dict[str, bytes] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)

    def add(self, row: Row, documents: dict[str, bytes], images: dict[str, bytes]) -> bool:
        """Add the parts of an episode if all of them fit."""
        new = {name: data for name, data in images.items() if name not in self.images}
        size = sum(_size(name, data) for part in (documents, new) for name, data in part.items()) + _size(
            "", _json(row.plain())
        )
        if size > self.room:
            return False
        self.rows.append(row)
        self.room -= size
        self.documents |= documents
        self.images |= new
        return True

    def drop_last(self) -> str:
        """Remove the newest episode, and return its name. Its images stay: others may show them."""
        row = self.rows.pop()
        for name in [each for each in self.documents if each.split("\n")[1:3] == [row.run, row.episode]]:
            del self.documents[name]
        return row.episode


def write_file(listing: Listing, path: Path, filter: str, text: str, limit: int) -> Written:
    """Write the episodes that a filter and a text choose to one HTML file.

    Args:
        listing: The episodes.
        path: The file.
        filter: An expression in CEL; empty: every episode.
        text: Only episodes in which this was said; empty: every episode.
        limit: Maximum size of the file in bytes. Episodes that do not fit are left out; a later and smaller one may fit.

    Raises:
        StoreError: the filter is not valid, a store is damaged, or the file cannot be written.
    """
    documents = Documents(listing)
    keys = listing.keys(filter, text)
    shell = len(_page(b"", ""))
    contents = _Contents(limit - shell - 4096)
    written = Written(chosen=len(keys))
    too_large: list[str] = []
    without_tokens: list[str] = []
    for run, episode in keys:
        row = listing.row(run, episode)
        own, images = _episode(documents, run, episode)
        if contents.add(row, own | _tokens(documents, run, episode), images):
            continue
        if contents.add(row, own, images):
            without_tokens.append(episode)
        else:
            too_large.append(episode)
    page = _composed(documents, contents, filter, text, written, too_large, without_tokens, limit)
    while len(page) > limit and contents.rows:  # the pictures of machines and the lists of samples are known only now
        for _ in range(1 + (len(page) - limit) * len(contents.rows) // len(page)):
            too_large.append(contents.drop_last())
        page = _composed(documents, contents, filter, text, written, too_large, without_tokens, limit)
    if len(page) > limit:
        raise StoreError(
            f"the pages alone take {len(page) / 1e6:.2f} MB, and the maximum size is {limit / 1e6:g} MB; raise --max-size"
        )
    with whole_file(path) as draft:
        draft.write_bytes(page)
    written.episodes, written.bytes = len(contents.rows), len(page)
    return written


def _composed(
    documents: Documents,
    contents: _Contents,
    filter: str,
    text: str,
    written: Written,
    too_large: list[str],
    without_tokens: list[str],
    limit: int,
) -> bytes:
    """Return the whole file, and say in `written` what is left out."""
    kept = {row.episode for row in contents.rows}
    written.left_out = [
        f"{what} that do not fit into {limit / 1e6:g} MB: {len(names)} of {written.chosen} "
        f"({', '.join(names[:8])}{', …' if len(names) > 8 else ''}); raise --max-size"
        for what, names in (
            ("episodes", too_large),
            ("the tokens of episodes", [each for each in without_tokens if each in kept]),
        )
        if names
    ]
    shared = _shared(documents, contents)
    return _page(_data(documents, contents, shared, filter, text, written), _title(contents))


def _size(name: str, data: bytes) -> int:
    """Bytes of a part in the file. A `<` is written with six characters."""
    return len(_json(name)) + len(data) + 5 * data.count(b"<") + 2


def _key(name: str, *values: str) -> str:
    """The key under which `data.js` looks for a document."""
    return "\n".join((name, *values))


def _json(value: Any) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)


def _episode(documents: Documents, run: str, episode: str) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """Return an episode's document and its images as `data:` addresses, as JSON."""
    document = documents.episode(run, episode)
    assert isinstance(document, dict)
    shown = [each for turn in document["turns"] for each in turn["shown"] if isinstance(each, dict)]
    images: dict[str, bytes] = {}
    for message in (*document["messages"], *shown):
        for part in message["parts"]:
            digest = part.get("image")
            if digest is None or digest in images:
                continue
            try:
                found = documents.image(run, digest)
            except EngineError:
                continue  # the page says that the image is not in the file
            images[digest] = _json(f"data:{found.mime};base64,{base64.b64encode(found.data).decode()}")
    return {_key("episode", run, episode): _json(document)}, images


def _tokens(documents: Documents, run: str, episode: str) -> dict[str, bytes]:
    document = documents.episode(run, episode)
    assert isinstance(document, dict)
    branches = [str(each["index"]) for each in document["branches"]] if document["finished"] else ["-1"]
    return {_key("tokens", run, episode, branch): _json(documents.tokens(run, episode, branch)) for branch in branches}


def _shared(documents: Documents, contents: _Contents) -> dict[str, bytes]:
    """Return the machines and the groups of the episodes."""
    found: dict[str, bytes] = {}
    for run in dict.fromkeys(row.run for row in contents.rows):
        found[_key("machine", run)] = _json(documents.machine(run))
        kept = {row.episode for row in contents.rows if row.run == run}
        for task in dict.fromkeys(row.task for row in contents.rows if row.run == run):
            group = documents.group(run, task)
            assert isinstance(group, dict)
            samples = [each for each in group["samples"] if each["episode"] in kept]
            group |= {"samples": samples, "left_out": group["left_out"] + len(group["samples"]) - len(samples)}
            found[_key("group", run, task)] = _json(group)
    return found


def _title(contents: _Contents) -> str:
    runs = list(dict.fromkeys(row.run for row in contents.rows))
    return runs[0] if len(runs) == 1 else f"{len(runs)} runs"


def _data(
    documents: Documents, contents: _Contents, shared: dict[str, bytes], filter: str, text: str, written: Written
) -> bytes:
    """Return the data of the file as JSON, safe inside an element `script`."""
    sources = documents.sources()
    assert isinstance(sources, dict)
    runs = {row.run for row in contents.rows}
    sources |= {
        "title": _title(contents),
        "sources": [each for each in sources["sources"] if each["key"] in runs],
        "trainings": [],
        "note": "; ".join(f"left out: {line}" for line in written.left_out) or None,
    }
    rows = contents.rows
    done = [row for row in rows if row.status == "done"]
    chosen = " and ".join([*([f"filter {filter}"] if filter else []), *([f"text {text!r}"] if text else [])])
    totals = {
        "episodes": len(rows),
        "done": len(done),
        "solved": sum(bool(row.solved) for row in done),
        "failed": sum(row.failure is not None for row in done),
        "limited": sum(row.failure is None and row.limit is not None for row in done),
        "reward": sum(row.reward or 0.0 for row in done) / len(done) if done else None,
        "chosen": chosen,
    }
    parts = [
        _json(key) + b":" + value
        for key, value in ((_key("sources"), _json(sources)), *shared.items(), *contents.documents.items())
    ]
    pictures = [_json(key) + b":" + value for key, value in contents.images.items()]
    whole = b'{"documents":{%s},"images":{%s},"rows":%s,"totals":%s}' % (
        b",".join(parts),
        b",".join(pictures),
        _json([row.plain() for row in rows]),
        _json(totals),
    )
    for character, escape in _ESCAPES:
        whole = whole.replace(character, escape)
    return whole


def _page(data: bytes, title: str) -> bytes:
    script, style = assets.one_script(), assets.read("style.css") or ""
    policy = f"default-src 'none'; img-src data:; script-src '{_digest(script)}'; style-src '{_digest(style)}'; base-uri 'none'"
    head = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{html.escape(policy)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<meta name="color-scheme" content="light dark">\n'
        f'<title>{html.escape(title)}</title>\n<link rel="icon" href="data:,">\n<style>{style}</style>\n</head>\n<body>\n'
        '<a class="skip" href="#main">Skip to the content</a>\n<header id="top"></header>\n<main id="main" tabindex="-1"></main>\n'
        '<div id="live" role="status" aria-live="polite"></div>\n<noscript>This page needs JavaScript.</noscript>\n'
        '<script type="application/json" id="offline-data">'
    )
    tail = f'</script>\n<script type="module">{script}</script>\n</body>\n</html>\n'
    return head.encode() + data + tail.encode()


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
