"""One HTML file with chosen episodes, which needs neither a server nor a network: the same pages, with the documents
inside.

Invariants:
- The file asks for nothing: its Content-Security-Policy allows only the script and the styles inside it, and images
  inside it.
- Nothing is left out silently: what does not fit into the size is named in the file and in the result.
"""

from __future__ import annotations

import base64
import hashlib
import html
from contextlib import suppress
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


class SingleFile:
    """The documents of chosen episodes, and the page that holds them. Episodes that do not fit are left out; a later
    and smaller one may fit.

    Args:
        listing: The episodes.
        filter: An expression in CEL; empty: every episode.
        text: Only episodes in which this was said; empty: every episode.
        limit: Maximum size of the file in bytes.

    Raises:
        StoreError: the filter is not valid, or a store is damaged.
    """

    def __init__(self, listing: Listing, filter: str, text: str, limit: int) -> None:
        self._all = Documents(listing)
        self._filter, self._text, self._limit = filter, text, limit
        self._room = limit - len(_page(b"", "")) - 4096
        self._documents: dict[str, bytes] = {}
        self._images: dict[str, bytes] = {}
        self._too_large: list[str] = []
        self._without_tokens: list[str] = []
        self.rows: list[Row] = []
        """The episodes in the file."""
        self.chosen = 0
        """Number of episodes that the filter chose."""
        for run, episode in listing.keys(filter, text):
            self.chosen += 1
            self._add(listing.row(run, episode))

    def _add(self, row: Row) -> None:
        """Add an episode with its tokens, or without them, if it fits."""
        document = self._all.episode(row.run, row.episode)
        assert isinstance(document, dict)
        branches = [str(branch["index"]) for branch in document["branches"]] if document["finished"] else ["-1"]
        episode = {_key("episode", row.run, row.episode): _json(document)}
        tokens = {
            _key("tokens", row.run, row.episode, branch): _json(self._all.tokens(row.run, row.episode, branch))
            for branch in branches
        }
        shown = [message for turn in document["turns"] for message in turn["shown"] if isinstance(message, dict)]
        parts = [part for message in (*document["messages"], *shown) for part in message["parts"]]
        images: dict[str, bytes] = {}  # as `data:` addresses, as JSON, by digest
        for digest in dict.fromkeys(part["image"] for part in parts if part.get("image") is not None):
            with suppress(EngineError):  # the page says that the image is not in the file
                image = self._all.image(row.run, digest)
                images[digest] = _json(f"data:{image.mime};base64,{base64.b64encode(image.data).decode()}")
        if self._fit(row, episode | tokens, images):
            return
        left_out = self._without_tokens if self._fit(row, episode, images) else self._too_large
        left_out.append(row.episode)

    def _fit(self, row: Row, documents: dict[str, bytes], images: dict[str, bytes]) -> bool:
        """Add the parts of an episode if there is room for all of them."""
        new = {name: data for name, data in images.items() if name not in self._images}
        size = sum(_size(name, data) for part in (documents, new) for name, data in part.items())
        size += _size("", _json(row.plain()))
        if size > self._room:
            return False
        self.rows.append(row)
        self._room -= size
        self._documents |= documents
        self._images |= new
        return True

    def write(self, path: Path) -> None:
        """Write the whole file. Its newest episodes are removed until it fits: the pictures of machines and the lists
        of samples are known only now.

        Raises:
            StoreError: the pages alone are larger than the limit, or the file cannot be written.
        """
        page = _page(self._data(), self._title())
        while len(page) > self._limit and self.rows:
            for _ in range(1 + (len(page) - self._limit) * len(self.rows) // len(page)):
                row = self.rows.pop()  # its images stay: others may show them
                for name in [key for key in self._documents if key.split("\n")[1:3] == [row.run, row.episode]]:
                    del self._documents[name]
                self._too_large.append(row.episode)
            page = _page(self._data(), self._title())
        if len(page) > self._limit:
            raise StoreError(
                f"the pages alone take {len(page) / 1e6:.2f} MB, and the maximum size is {self._limit / 1e6:g} MB; "
                "raise --max-size"
            )
        with whole_file(path) as draft:
            draft.write_bytes(page)

    @property
    def left_out(self) -> list[str]:
        """What is not in the file, in words."""
        there = {row.episode for row in self.rows}
        lists = {
            "episodes": self._too_large,
            "the tokens of episodes": [name for name in self._without_tokens if name in there],
        }
        return [
            f"{what} that do not fit into {self._limit / 1e6:g} MB: {len(names)} of {self.chosen} "
            f"({', '.join(names[:8])}{', …' if len(names) > 8 else ''}); raise --max-size"
            for what, names in lists.items()
            if names
        ]

    def _title(self) -> str:
        runs = list(dict.fromkeys(row.run for row in self.rows))
        return runs[0] if len(runs) == 1 else f"{len(runs)} runs"

    def _shared(self) -> dict[str, bytes]:
        """The machines and the groups of the episodes."""
        shared: dict[str, bytes] = {}
        for run in dict.fromkeys(row.run for row in self.rows):
            shared[_key("machine", run)] = _json(self._all.machine(run))
            there = {row.episode for row in self.rows if row.run == run}
            for task in dict.fromkeys(row.task for row in self.rows if row.run == run):
                group = self._all.group(run, task)
                assert isinstance(group, dict)
                samples = [sample for sample in group["samples"] if sample["episode"] in there]
                group |= {"samples": samples, "left_out": group["left_out"] + len(group["samples"]) - len(samples)}
                shared[_key("group", run, task)] = _json(group)
        return shared

    def _data(self) -> bytes:
        """Return the data of the file as JSON, safe inside an element `script`."""
        sources = self._all.sources()
        assert isinstance(sources, dict)
        runs = {row.run for row in self.rows}
        sources |= {
            "title": self._title(),
            "sources": [source for source in sources["sources"] if source["key"] in runs],
            "trainings": [],
            "note": "; ".join(f"left out: {line}" for line in self.left_out) or None,
        }
        done = [row for row in self.rows if row.status == "done"]
        chosen = [f"filter {self._filter}"] * bool(self._filter) + [f"text {self._text!r}"] * bool(self._text)
        totals = {
            "episodes": len(self.rows),
            "done": len(done),
            "solved": sum(bool(row.solved) for row in done),
            "failed": sum(row.failure is not None for row in done),
            "limited": sum(row.failure is None and row.limit is not None for row in done),
            "reward": sum(row.reward or 0.0 for row in done) / len(done) if done else None,
            "chosen": " and ".join(chosen),
        }
        documents = {_key("sources"): _json(sources), **self._shared(), **self._documents}
        data = b'{"documents":{%s},"images":{%s},"rows":%s,"totals":%s}' % (
            _members(documents),
            _members(self._images),
            _json([row.plain() for row in self.rows]),
            _json(totals),
        )
        for character, escape in _ESCAPES:
            data = data.replace(character, escape)
        return data


def _size(name: str, data: bytes) -> int:
    """Bytes of a part in the file. A `<` is written with six characters."""
    return len(_json(name)) + len(data) + 5 * data.count(b"<") + 2


def _key(name: str, *values: str) -> str:
    """The key under which `data.js` looks for a document."""
    return "\n".join((name, *values))


def _json(value: Any) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)


def _members(parts: dict[str, bytes]) -> bytes:
    """The members of a JSON object."""
    return b",".join(_json(key) + b":" + value for key, value in parts.items())


def _page(data: bytes, title: str) -> bytes:
    script, style = assets.one_script(), assets.read("style.css") or ""
    policy = (
        f"default-src 'none'; img-src data:; script-src '{_digest(script)}'; style-src '{_digest(style)}'; base-uri "
        "'none'"
    )
    head = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{html.escape(policy)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<meta name="color-scheme" '
        'content="light dark">\n'
        f'<title>{html.escape(title)}</title>\n<link rel="icon" '
        f'href="data:,">\n<style>{style}</style>\n</head>\n<body>\n'
        '<a class="skip" href="#main">Skip to the content</a>\n<header id="top"></header>\n<main id="main" '
        'tabindex="-1"></main>\n'
        '<div id="live" role="status" aria-live="polite"></div>\n<noscript>This page needs JavaScript.</noscript>\n'
        '<script type="application/json" id="offline-data">'
    )
    tail = f'</script>\n<script type="module">{script}</script>\n</body>\n</html>\n'
    return head.encode() + data + tail.encode()


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
