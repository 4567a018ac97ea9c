"""The guard's own process: renders conversations with Jinja, and compares them with the tokens of their branches.

It shares no code with what makes the tape (check.py, wrapper.py, bridge.py, tokenizer.py), so that one bug cannot hide
itself, and imports only what it needs. `compare` is called by `engine.processes.worker`.
"""

from __future__ import annotations

import json
import os
import re
import sys
from array import array
from base64 import b64decode
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cached_property, lru_cache
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import msgspec

from engine.tokens.byte_level import ByKey, bytes_by_id, decoded
from engine.tokens.jinja import compile_template

Json = dict[str, Any]
_MARK = "\ufdd0"
_MARKS = re.compile(f"{_MARK}{_MARK}?")
"""How text is quoted that only spells a special token: see `engine.tokens.tokenizer`."""
_SAMPLED = ("generated", "unreceived")
"""Kinds of spans that the model sampled."""
_EXCERPT, _BEFORE = 60, 12
"""Characters of a text that a difference quotes: in all, and how many before it."""
_SHORT = 16
"""Characters by which a message's beginning is found in what the template writes."""
_REMEMBERED = 1 << 16
"""Texts between replies whose ids are kept."""
_MOST_FORMS = 16
_forms: dict[str, _Form] = {}


_Run = tuple[bool, int, int]
"""Whether the model sampled it, and its tokens [start, end) of a branch."""


class _Piece(msgspec.Struct, frozen=True):
    """A run of a branch as text."""

    sampled: bool
    start: int
    """Its first token in the branch."""
    ids: list[int]
    """Its ids, with one marker for an image."""
    text: str
    images: Sequence[tuple[int, int]] = ()
    """The index of each marker in `ids`, and how many tokens it stands for."""

    def token(self, at: int) -> int:
        """The index in the branch of number `at` of `ids`."""
        return self.start + at + sum(count - 1 for marker, count in self.images if marker < at)


class _Form:
    """One chat format: a template and a tokenizer."""

    def __init__(self, facts: Json) -> None:
        self._facts = facts
        self.encode = lru_cache(_REMEMBERED)(self._encode)

    @cached_property
    def _backend(self) -> Any:
        file = self._facts["tokenizer"]
        return _tokenizer(file, Path(file).stat().st_mtime_ns)

    @cached_property
    def _format(self) -> Any:
        """The engine's own chat format, where it has no template (a family of `renderers`) or a tokenizer without a
        file."""
        from engine.schemas.model import ModelSpec
        from engine.tokens.loading import load_format

        return load_format(ModelSpec.model_validate(self._facts["model"]), Path(self._facts["base"]))

    @cached_property
    def _added(self) -> frozenset[int]:
        if "sources" not in self._facts:
            return frozenset(self._format.fast.added.values())
        return frozenset(self._backend.get_added_tokens_decoder())

    @cached_property
    def _bytes(self) -> ByKey[int, bytes] | None:
        if type(self._backend.decoder).__name__ != "ByteLevel":
            return None
        return bytes_by_id(self._backend)

    @cached_property
    def absorbs(self) -> bool:
        """Whether tokens do not give all of a text back: added tokens take white space in, or pieces begin with a space
        of their own."""
        if "sources" not in self._facts:
            return True
        added = self._backend.get_added_tokens_decoder().values()
        return self._bytes is None or any(token.lstrip or token.rstrip for token in added)

    @cached_property
    def _anchor(self) -> tuple[int, str]:
        """An added token and its text: other decoders than byte-level ones leave out the space of a first token."""
        id_ = min(self._added)
        return id_, self._backend.decode([id_], skip_special_tokens=False)

    def decode(self, ids: list[int]) -> str:
        """The text of ids inside a longer text."""
        if "sources" not in self._facts:
            return str(self._format.decode(ids))
        if self._bytes is not None:
            return decoded(self._bytes, ids)
        first, text = self._anchor
        return str(self._backend.decode([first, *ids], skip_special_tokens=False)[len(text) :])

    def _encode(self, text: str) -> list[int]:
        """The ids of a text, special tokens that it spells included."""
        if "sources" not in self._facts:
            return list(self._format.encode(text))
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    @cached_property
    def tells_time(self) -> bool:
        """Whether the template may write the time."""
        return any("strftime_now" in source for source in self._facts.get("sources", ()))

    @property
    def hides(self) -> bool:
        """Whether the engine hides text from the template that only spells a special token."""
        return "sources" in self._facts and not self._facts["allow_special"]

    def normal(self, text: str) -> str:
        """A text in the form of Unicode that the tokenizer reads."""
        if text.isascii() or "sources" not in self._facts or self._backend.normalizer is None or self._bytes is None:
            return text
        return str(self._backend.normalizer.normalize_str(text))

    def views(self, messages: Iterable[Json], verbatim: dict[str, Json], *, quoted: bool = False) -> list[Json]:
        """Messages as `apply_chat_template` gets them; quoted where there are marks (see `unmarked`), or all of them
        with `quoted`."""
        facts, marks = self._facts, quoted or bool(verbatim)
        views: list[Json] = []
        for number, message in enumerate(messages):
            if number and facts["skips_system"] and message["role"] == "system":
                continue
            view = verbatim.get(str(number))
            if view is None:
                view = _view(message, facts["tool_role"])
                view = self._quoted(view) if quoted else _doubled(view) if marks and self.hides else view
            if facts["alternates"] and views and views[-1]["role"] == view["role"] == "user":
                view = {**view, "content": _joined(views.pop()["content"], view["content"])}
            views.append(view)
        return views

    def unmarked(self, text: str, verbatim: dict[str, Json]) -> str:
        """What was rendered, before quoting. A reply's own text that only spells a token stays hidden from the
        template's tests."""
        return _unquoted(text) if verbatim and self.hides else text

    def _quoted(self, value: Any) -> Any:
        """A value with a mark in each text that spells an added token."""
        if isinstance(value, str):
            return self._tokens.sub(lambda match: f"{match[0][0]}{_MARK}{match[0][1:]}", _doubled(value))
        if isinstance(value, dict):
            return {key: self._quoted(item) for key, item in value.items()}
        return [self._quoted(item) for item in value] if isinstance(value, list) else value

    @cached_property
    def _tokens(self) -> re.Pattern[str]:
        texts = [str(token) for token in self._backend.get_added_tokens_decoder().values()]
        return re.compile("|".join(map(re.escape, sorted(filter(str.strip, texts), key=len, reverse=True))))

    def render(self, views: list[Json], tools: list[Json] | None, now: float) -> str:
        """What the template wrote at a time (Unix), generation prompt included."""
        facts = self._facts
        if "sources" not in facts:
            return str(self._format.text(views, tools))
        shown = views
        if facts["in_parts"]:
            shown = [
                {**view, "content": [{"type": "text", "text": view["content"]}]}
                if isinstance(view["content"], str)
                else view
                for view in shown
            ]
        key = facts["reasoning_key"]
        if key != "reasoning_content":
            shown = [
                {**view, key: view["reasoning_content"]} if view.get("reasoning_content") else view for view in shown
            ]
        template = compile_template(facts["sources"][-1 if tools else 0])
        return self.normal(
            template.render(
                messages=shown,
                tools=tools,
                documents=None,
                add_generation_prompt=True,
                strftime_now=datetime.fromtimestamp(now).strftime,
                **facts["variables"],
            )
        )

    def piece(self, ids: list[int], run: _Run, images: Sequence[Sequence[int]]) -> _Piece:
        """One run of a branch."""
        sampled, start, end = run
        run_ids = ids[start:end]
        markers: list[tuple[int, int]] = []
        for begin, stop in reversed(images):
            if start <= begin < end:
                run_ids[begin - start : stop - start] = [self._facts["marker"]]
                markers = [(begin - start, stop - begin), *((at - stop + begin + 1, count) for at, count in markers)]
        return _Piece(sampled, start, run_ids, self.normal(self.decode(run_ids)), markers)

    def misread(self, piece: _Piece) -> int | None:
        """The index of the first token of a piece that its text is not tokenised to; None where there is none."""
        if piece.sampled or not piece.ids or (piece.start and piece.ids[0] not in self._added):
            return None  # what begins inside a text is not encoded apart from it
        ids = self.encode(piece.text)
        if ids == piece.ids:
            return None
        if sum(id_ in self._added for id_ in ids) > sum(id_ in self._added for id_ in piece.ids):
            ids = self._spelled(piece.ids)  # text that only spells a special token is not that token
        pairs = enumerate(zip(ids, piece.ids, strict=False))
        return next((at for at, (a, b) in pairs if a != b), None if ids == piece.ids else min(len(ids), len(piece.ids)))

    def _spelled(self, ids: list[int]) -> list[int]:
        """Ids whose texts between added tokens are encoded again, without reading such tokens in them."""
        if "sources" not in self._facts or self._bytes is None:
            return ids  # other tokenizers do not give such texts apart
        again: list[int] = []
        for added, run in groupby(ids, self._added.__contains__):
            run_ids = list(run)
            again += run_ids if added else self._plain.encode(self.decode(run_ids), add_special_tokens=False).ids
        return again

    @cached_property
    def _plain(self) -> Any:
        """The tokenizer without added tokens."""
        from tokenizers import Tokenizer

        plain = Tokenizer(self._backend.model)
        if self._backend.normalizer is not None:
            plain.normalizer = self._backend.normalizer
        if self._backend.pre_tokenizer is not None:
            plain.pre_tokenizer = self._backend.pre_tokenizer
        return plain


@lru_cache(maxsize=4)
def _tokenizer(file: str, _: int) -> Any:
    """The tokenizer of a file as it was at a time: formats with other templates share it."""
    from tokenizers import Tokenizer

    return Tokenizer.from_file(file)


def compare(_: Any, asked: Json) -> list[Json]:
    """Compare the branches of episodes with what their template writes.

    Args:
        asked: `form`, and `episodes`: rows as they are stored, and what each branch was shown.

    Returns:
        For each episode {}, or its first difference: `branch`, `token`, `id`, `turns` and `message`; or {"error": why
        there is no answer}.
    """
    facts = asked["form"]
    form = _forms.get(facts["key"])
    if form is None:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        with suppress(OSError):  # the first process to go where memory is short
            Path("/proc/self/oom_score_adj").write_text("1000")
        if len(_forms) == _MOST_FORMS:
            _forms.clear()
        form = _forms[facts["key"]] = _Form(facts)
    return [_checked(form, episode) for episode in asked["episodes"]]


def _checked(form: _Form, episode: Json) -> Json:
    try:
        messages = episode["episode"]["messages"]
        for number, ((spans, data), place) in enumerate(zip(episode["branches"], episode["shown"], strict=True)):
            difference = _difference(form, messages, spans, data, place)
            if difference is not None:
                return {"branch": number, **difference}
    except Exception as error:  # noqa: BLE001 - the one who asked decides what an episode without an answer is
        return {"error": f"{type(error).__name__}: {error}"}
    return {}


def _difference(form: _Form, messages: list[Json], spans: Any, data: str, place: Sequence[Any]) -> Json | None:
    thread, verbatim, tools, inherited, now = place
    shown = (
        messages[:thread]
        if isinstance(thread, int)
        else [messages[item] if isinstance(item, int) else item for item in thread]
    )
    buffer = array("i")
    buffer.frombytes(b64decode(data))
    if sys.byteorder == "big":
        buffer.byteswap()
    ids = buffer.tolist()
    runs, images, turns = _runs(json.loads(spans), inherited)
    views = form.views(shown, verbatim)

    def difference(token: int, message: str) -> Json:
        answer = {"token": token, "id": ids[token] if token < len(ids) else -1, "turns": turns, "message": message}
        return answer | {"spelled": _is_spelled(form, shown, verbatim, tools, now, pieces)}

    pieces: list[_Piece] = []
    prompted = runs[-1][-1]
    try:
        text = form.unmarked(form.render(views, tools, now), verbatim)
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - a template may raise anything
        return difference(prompted, f"the chat template refuses the conversation before it: {error}")
    same = not images and form.normal(form.decode(ids[:prompted])) == text
    pieces = [form.piece(ids, run, images) for run in runs if not same or not run[0]]
    if not same:
        apart = _apart(pieces, text)
        if apart is not None and form.tells_time:  # the prompt was rendered a little before its time was noted
            earlier = form.unmarked(form.render(views, tools, now - 1), verbatim)
            apart = None if _apart(pieces, earlier) is None else apart
        if apart is not None and form.absorbs:
            text = form.decode(form.encode(text))
            apart = _apart(pieces, text)
        if apart is not None:
            piece, offset, at = apart
            row = "".join([item.text for item in pieces if item.start >= piece.start])
            return difference(
                # the token that holds the character
                piece.token(
                    bisect_right(
                        range(max(len(piece.ids) - 1, 0)), offset, key=lambda at: len(form.decode(piece.ids[: at + 1]))
                    )
                ),
                f"{_where(views, text, at)}, the chat template writes {_quote(text[max(at - _BEFORE, 0) :])}, "
                f"and the row has {_quote(row[max(offset - _BEFORE, 0) :])}",
            )
    for piece in pieces:
        wrong = form.misread(piece)
        if wrong is not None:
            read = form.encode(piece.text)[wrong : wrong + 6]
            return difference(
                piece.token(wrong),
                f"the text {_quote(form.decode(piece.ids[max(wrong - 2, 0) :]))} is tokenised to {read} at its token "
                f"{min(wrong, 2)}, and the row has "
                f"{piece.ids[wrong : wrong + 6]}",
            )
    return None


def _is_spelled(
    form: _Form, shown: list[Json], verbatim: Any, tools: Any, now: float, pieces: Sequence[_Piece]
) -> bool:
    """Whether a branch is what the template writes if text that only spells a special token is hidden from it."""
    if not pieces or not form.hides:
        return False
    try:
        text = form.render(form.views(shown, verbatim, quoted=True), tools, now)
    except Exception:  # noqa: BLE001 - a template may raise anything
        return False
    return _apart(pieces, _unquoted(text)) is None


def _runs(spans: list[Any], inherited: Sequence[Sequence[int]]) -> tuple[list[_Run], list[list[int]], int]:
    """The runs of a branch up to its last reply, in order, its images, and how many replies it has."""
    token_spans = [span for span in spans if span[0] not in ("image", "experts")]
    replies = [at for at, span in enumerate(token_spans) if span[0] in _SAMPLED]
    runs: list[_Run] = []
    for kind, start, end, *_ in token_spans[: replies[-1]]:
        cuts = [start, *(edge for run in inherited for edge in run), end] if kind == "prompt" else [start, end]
        runs += [(kind in _SAMPLED or number % 2 == 1, *run) for number, run in enumerate(pairwise(cuts))]
    return runs, [span[1:3] for span in spans if span[0] == "image"], len(replies)


def _apart(pieces: Sequence[_Piece], text: str) -> tuple[_Piece, int, int] | None:
    """Where a branch differs from a text: (piece, character of it, character of the text); None where white space of
    replies alone does."""
    places = {0}
    furthest = (pieces[0], 0, 0)
    for piece in pieces:
        after: set[int] = set()
        for start in places:
            if text.startswith(piece.text, start):
                after.add(start + len(piece.text))
            if piece.sampled:
                after.update(_ends(piece.text, text, start))
        if not after:
            same, start = max((_same(piece.text, text, start), start) for start in places)
            return piece, same, start + same
        places = after
        furthest = (piece, len(piece.text), max(places))
    return None if len(text) in places else furthest


def _same(said: str, text: str, start: int) -> int:
    """How many characters of the beginning of `said` stand in a text at `start`."""
    pairs = enumerate(zip(said, text[start : start + len(said)], strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(said), len(text) - start))


def _ends(said: str, text: str, start: int) -> Iterable[int]:
    """Where a reply that begins at `start` may end in a text, if only white space differs."""
    at = start
    for character in said:
        if character.isspace():
            continue
        while at < len(text) and text[at].isspace():
            at += 1
        if at >= len(text) or text[at] != character:
            return
        at += 1
    yield at
    while at < len(text) and text[at].isspace():
        at += 1
        yield at


def _where(views: Sequence[Json], text: str, at: int) -> str:
    """The message in which, or after which, a character of the rendered text stands."""
    place, cursor = "before the first message", 0
    for number, view in enumerate(views):
        content = view["content"]
        parts = [content] if isinstance(content, str) else [part["text"] for part in content if part["type"] == "text"]
        words = next((part.strip() for part in parts if part.strip()), "")
        start = text.find(words[:_SHORT], cursor) if words else -1
        if start < 0:
            continue
        if start > at:
            break
        same = _same(words, text, start)
        cursor = start + same
        inside = at < cursor or (at == cursor and same < len(words))
        place = f"{'in' if inside else 'after'} message {number} (`{view['role']}`)"
    return place


def _quote(text: str) -> str:
    return repr(text if len(text) <= _EXCERPT else f"{text[:_EXCERPT]}…")


def _view(message: Json, tool_role: str) -> Json:
    role, content = message["role"], message["content"]
    if not isinstance(content, str):
        parts = [
            {"type": "image"} if part["type"] == "image" else {"type": "text", "text": part["text"]} for part in content
        ]
        pictured = any(part["type"] == "image" for part in parts)
        content = parts if pictured else "".join([part["text"] for part in parts])
    if role == "tool" and tool_role == "user":
        return {"role": "user", "content": content}
    view: Json = {"role": role, "content": content}
    if role == "tool":
        view |= {key: message[key] for key in ("name", "tool_call_id") if message[key] is not None}
    if role == "assistant":
        if message["reasoning"]:
            view["reasoning_content"] = message["reasoning"]
        if message["tool_calls"]:
            view["tool_calls"] = [
                {
                    "type": "function",
                    "id": call["id"],
                    "function": {"name": call["name"], "arguments": call["arguments"]},
                }
                for call in message["tool_calls"]
            ]
    return view


def _unquoted(text: str) -> str:
    return _MARKS.sub(lambda match: match[0][1:], text) if _MARK in text else text


def _doubled(value: Any) -> Any:
    """A value of which `_unquoted` gives the texts."""
    if isinstance(value, str):
        return value.replace(_MARK, _MARK + _MARK)
    if isinstance(value, dict):
        return {_doubled(key): _doubled(item) for key, item in value.items()}
    return [_doubled(item) for item in value] if isinstance(value, list) else value


def _joined(first: Any, second: Any) -> Any:
    """Two contents of neighbouring user messages as one, for a template that refuses two of them."""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n\n{second}"
    parts = [
        [{"type": "text", "text": content}] if isinstance(content, str) else content for content in (first, second)
    ]
    return [*parts[0], {"type": "text", "text": "\n\n"}, *parts[1]]
