"""The JSON documents of the pages, by name. The server answers with them, and a file of `--export` holds them.

    documents = Documents(Listing([find("latest")]))
    documents.answer("episode", {"run": "quickstart-…", "id": "sum-17/0"})

Every parameter is a text, as it stands in an address.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from getpass import getuser
from itertools import chain, combinations, islice
from pathlib import Path
from threading import Event, Lock
from typing import TYPE_CHECKING, Any

import orjson

from engine import plugin
from engine.actions.facts import events_of
from engine.errors import EngineError, StoreError
from engine.machine.machine import resolved_machine
from engine.plugins.compare.run_comparison import compare_runs
from engine.plugins.show.listing.episode import common_start, episode_document
from engine.plugins.show.listing.tokens import sampled_columns, texts_of, token_columns
from engine.plugins.show.listing.training import Training
from engine.plugins.view.charts import charts_of
from engine.plugins.view.home import entries, numbers_of
from engine.plugins.view.training_notes import banners, explained, status_of
from engine.store.reviews import REVIEWS
from engine.store.rows.export import training_rows
from engine.store.rows.row import columns_of
from engine.store.shown_messages import reply_numbers

if TYPE_CHECKING:
    from engine.plugins.show.listing.listing import Listing
    from engine.schemas.trajectory import Trajectory
    from engine.store.images import StoredImage
    from engine.store.reader import RunReader


Document = dict[str, Any] | list[Any]
_SHOWN_IMAGES = frozenset({"image/png", "image/jpeg", "image/gif", "image/webp", "image/bmp"})
"""Media types that a browser draws and that hold no code."""
_ENTRY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_RUN = re.compile(r"[A-Za-z0-9][\w.-]*")
_NAMING = frozenset({"run", "within", "key", "training", "first", "second"})
"""Parameters that name a run or training."""
_FIRST = frozenset({"page", "episode", "numbers"})
"""Documents that the page of an address shows first."""
_AGAIN = 20
"""Numbers of a run are computed again after this many times the seconds that they took."""
MOST_ROWS = 500
"""Maximum number of rows of one page."""


_PLAYING = Lock()
"""One scenario is played at a time, because what it may import is a matter of the process."""


def _entry_points(written: Any) -> Iterator[str]:
    """The entry points in a spec: every text that could be one."""
    if isinstance(written, str):
        if _ENTRY.fullmatch(written):
            yield written
    elif isinstance(written, dict | list):
        for value in written.values() if isinstance(written, dict) else written:
            yield from _entry_points(value)


class Documents:
    """Documents over a list of episodes.

    Args:
        listing: The episodes.
        look: Returns the folders of runs and trainings that belong into the list now.
        out: A folder of runs and trainings, which are added to the list when an address names them.
    """

    def __init__(self, listing: Listing, look: Callable[[], Iterable[Path]] = tuple, out: Path | None = None) -> None:
        self.listing = listing
        self._out = out
        self._look = look
        self._numbers: dict[str, tuple[float, dict[str, Any]]] = {}
        """By key: until when the numbers are shown, and the numbers."""
        self._parts: dict[str, Listing] = {}
        self.answered = Event()
        """Set when the first part of the list, or the first episode, was answered."""

    def sources(self) -> Document:
        """Return the stores and trainings that are shown."""
        self.listing.statuses()
        sources = self.listing.sources
        names = {source.key if source.training is None else Path(source.training).name for source in sources}
        return {
            "title": names.pop() if len(names) == 1 else f"{len(names)} runs",
            "sources": [source.plain() for source in sources],
            "trainings": [folder.name for folder in self.listing.trainings],
            "note": None,
            "reviewer": getuser() if REVIEWS.all() else None,
        }

    def runs(self) -> Document:
        """Return the runs and trainings, newest first, without numbers."""
        self.listing.add(self._look())
        return entries(self.listing)

    def numbers(self, key: str) -> Document:
        """Return the numbers of a run or training, by its key in `runs`."""
        until, numbers = self._numbers.get(key, (0.0, {}))
        began = time.monotonic()
        if began >= until:
            numbers = numbers_of(self.listing, key)
            now = time.monotonic()
            self._numbers[key] = (now + _AGAIN * (now - began), numbers)
        return numbers

    def _within(self, key: str) -> Listing:
        """The episodes of a run or training; empty: all."""
        if key and key not in self._parts:
            self._parts[key] = self.listing.only(key)
        return self._parts.get(key, self.listing)

    def page(
        self,
        within: str = "",
        filter: str = "",
        text: str = "",
        sort: str = "order",
        descending: str = "false",
        offset: str = "0",
        limit: str = "100",
    ) -> Document:
        """Return a part of the list; see `Listing.page`."""
        size, listing = min(_number("limit", limit), MOST_ROWS), self._within(within)
        page = listing.page(filter, text, sort, descending == "true", _number("offset", offset), size)
        texts = listing.excerpts(page.rows, text)
        rows = [row.plain() | {"texts": each} for row, each in zip(page.rows, texts, strict=True)]
        return page.plain() | {"rows": rows}

    def totals(self, within: str = "", filter: str = "", text: str = "") -> Document:
        """Return counts and the mean reward of the list."""
        return self._within(within).totals(filter, text).plain()

    def charts(self, within: str = "", filter: str = "", text: str = "") -> Document:
        """Return the charts of the list; see `engine.plugins.view.charts`."""
        return charts_of(self._within(within), filter, text)

    def neighbours(
        self,
        run: str,
        episode: str,
        within: str = "",
        filter: str = "",
        text: str = "",
        sort: str = "order",
        descending: str = "false",
    ) -> Document:
        """Return the episodes before and after one in the list."""
        return self._within(within).neighbours(run, episode, filter, text, sort, descending == "true").plain()

    def episode(self, run: str, id: str, attempt: str | None = None) -> Document:
        """Return one episode."""
        number = None if attempt is None else _number("attempt", attempt)
        return episode_document(self.listing.store(run), id, number)

    def review(self, given: Any) -> Document:
        """Store a person's review of an episode, and return all reviews of it.

        Args:
            given: `run`, `id`, and fields of a review.

        Raises:
            StoreError: it is not a review of a finished episode, or it cannot be stored.
        """
        if not isinstance(given, dict) or not {"run", "id", "rating", "tags", "note"} == given.keys():
            raise StoreError("a review has `run`, `id`, `rating`, `tags` and `note`")
        store = self.listing.store(str(given.pop("run")))
        row = store.episode(str(given.pop("id")))
        if row.status != "done":
            raise StoreError(f"{row.id} is not finished, and only finished episodes can be reviewed")
        for reviews in REVIEWS.made(None, store.folder):
            reviews.write([{**given, "episode": row.id}])
            return list(reviews.of(row.id))
        raise StoreError(f"nothing stores reviews: {plugin.missing('commands', 'rate')}")

    def tokens(self, run: str, id: str, branch: str) -> Document:
        """Return the tokens of one branch; -1: those that an unfinished episode has sampled."""
        store = self.listing.store(run)
        return sampled_columns(store, id) if branch == "-1" else token_columns(store, id, _number("branch", branch))

    def group(self, run: str, task: str) -> Document:
        """Return the samples of a task, and where each two finished ones part.

        Raises:
            StoreError: a record is damaged.
        """
        store, rows = self.listing.store(run), self.listing.group(run, task)
        shown = rows[:MOST]
        finished = {row.sample: store.trajectory(row.episode) for row in shown if row.status == "done"}
        return {
            "run": store.run_id,
            "task": task,
            "samples": [row.plain() | {"id": row.episode} for row in shown],
            "left_out": len(rows) - len(shown),
            "parts": [
                {"first": first, "second": second, **parting(store, finished[first], finished[second])}
                for first, second in combinations(sorted(finished), 2)
            ],
        }

    def compare(self, first: str, second: str) -> Document:
        """Return two runs, paired by task."""
        found = compare_runs(self.listing.store(first), self.listing.store(second))
        return found.plain() | {"first": first, "second": second, "counts": found.counts}

    def training(self, training: str) -> Document:
        """Return the metrics of a training by step and what they mean, its warnings, and its evaluations.

        Raises:
            StoreError: There is no such training in this list.
        """
        folder = next((folder for folder in self.listing.trainings if folder.name == training), None)
        if folder is None:
            raise StoreError(f"there is no training `{training}` in this list")
        shown = Training(folder)
        curves = shown.curves()
        return {
            "training": training,
            "status": status_of(shown),
            "planned": shown.planned,
            "banners": banners(shown, time.time()),
            "steps": [line["step"] for line in shown.lines],
            "metrics": curves,
            "explained": {name: explained(name) for name in curves},
            "evaluations": [evaluation.plain() for evaluation in shown.evaluations()],
        }

    def prepare(self, patience: float) -> None:
        """Load the tokenizer of the first run, which panels of tokens need, after the first answer, which it would
        delay.

        Args:
            patience: Seconds to wait for the first answer at most.

        Raises:
            EngineError: a store cannot be read.
        """
        self.answered.wait(patience)
        if self.listing.sources:
            texts_of(self.listing.store(self.listing.sources[0].key))

    def scenario(self, run: str, id: str) -> Document:
        """Return a scenario of a finished episode, which was played and passes. Imports the code that the run names,
        unlike all other documents."""
        from engine.api.exports import recorded_scenario
        from engine.spec.code.entry import looking

        store = self.listing.store(run)
        with _PLAYING, looking([*_entry_points(store.header.spec)]):
            made = recorded_scenario(store, id)
        return {"name": made.name, "text": made.text, "notes": made.notes}

    def rows(self, within: str = "", filter: str = "", text: str = "") -> Iterator[bytes]:
        """Yield the training rows of the chosen episodes as JSON lines.

        Raises:
            StoreError: the filter is not valid.
            EntryError: the run's credit method is code that may not be imported.
        """
        keys = set(self._within(within).keys(filter, text))

        def lines() -> Iterator[bytes]:
            for source in self.listing.sources:
                wanted = {episode for run, episode in keys if run == source.key}
                if not wanted:
                    continue
                rows = training_rows(self.listing.store(source.key))
                for columns in columns_of(row for row in rows if row.episode.episode_id in wanted):
                    yield orjson.dumps(columns, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE)

        rest = lines()
        return chain([*islice(rest, 1)], rest)  # what is refused is refused before the answer begins

    def machine(self, run: str) -> Document:
        """Return the picture of a run's machine as SVG; None with the reason if it cannot be drawn."""
        if (draw := plugin.loaded("graph_formats").get("svg")) is None:
            return {"svg": None, "problem": plugin.missing("graph_formats", "svg")}
        try:
            machine = resolved_machine(self.listing.store(run).loaded_spec().spec)
            return {"svg": draw(machine, None, events_of(machine)), "problem": None}
        except EngineError as error:
            return {"svg": None, "problem": str(error)}

    def answer(self, name: str, parameters: Mapping[str, str]) -> Document:
        """Return a document by its name.

        Raises:
            StoreError: there is no such document or parameter, one is missing, or what it names does not exist.
        """
        if name not in NAMES:
            raise StoreError(f"there is no document `{name}`; there are {', '.join(NAMES)}")
        method: Callable[..., Document] = getattr(self, name)
        shown = {source.key.partition("/")[0] for source in self.listing.sources}
        for named in {parameters[key].partition("/")[0] for key in _NAMING & parameters.keys()} - shown:
            if self._out is not None and _RUN.fullmatch(named) and (self._out / named).is_dir():
                self.listing.add([self._out / named])  # one of the folder: an older one, which a link names
        try:
            document = method(**parameters)
            if name in _FIRST:
                self.answered.set()
            return document
        except TypeError as error:
            wrong = _wrong_parameter(method, parameters)
            if wrong is None:
                raise
            raise StoreError(f"`{name}`: {wrong}") from error

    def image(self, run: str, digest: str) -> StoredImage:
        """Return an image of a run.

        Raises:
            StoreError: the run has no such image, or its media type is not one that is shown.
        """
        image = self.listing.store(run).image(digest)
        if image.mime not in _SHOWN_IMAGES:
            raise StoreError(f"an image of type {image.mime} is not shown")
        return image


NAMES = (
    "sources",
    "runs",
    "numbers",
    "page",
    "totals",
    "charts",
    "neighbours",
    "episode",
    "tokens",
    "group",
    "machine",
    "compare",
    "training",
    "scenario",
)
"""The names of all documents."""


def _number(name: str, text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise StoreError(f"`{name}` must be a number from 0, not {text!r}")
    return int(text)


def _wrong_parameter(method: Callable[..., Any], given: Mapping[str, str]) -> str | None:
    """Say which parameter is unknown or missing; None if all are right."""
    from inspect import Parameter, signature

    known = signature(method).parameters
    if unknown := [name for name in given if name not in known]:
        return f"unknown parameter `{unknown[0]}`; it takes {', '.join(known)}"
    missing = [name for name, each in known.items() if each.default is Parameter.empty and name not in given]
    return f"the parameter `{missing[0]}` is missing" if missing else None


_AROUND = 12
"""Number of tokens that are shown from the place where two samples part."""
MOST = 16
"""Maximum number of samples in one document."""


def parting(store: RunReader, first: Trajectory, second: Trajectory) -> dict[str, Any]:
    """Return the first place where two samples of a task differ: in a reply, or in what was said between two replies.

    `turn` is the turn in which they differ; -1 for the prompt, None if they are the same as far as both go. For a
    difference between replies, `message` is true and `turn` is the turn before it. `token` counts from the first
    sampled token of the turn.
    """
    replies = reply_numbers(first), reply_numbers(second)
    before = 0
    for turn in range(max(len(first.turns), len(second.turns)) + 1):
        ends = [each[turn] if turn < len(each) else None for each in replies]
        said = [
            [(message.role, message.content) for message in each.messages[before:end]]
            for each, end in zip((first, second), ends, strict=True)
        ]
        if said[0] != said[1] and None not in ends:
            return {"turn": turn - 1, "message": True, "token": None, "texts": None}
        if None in ends:
            alike = ends[0] is ends[1] and said[0] == said[1]
            return {"turn": None if alike else turn - 1, "message": not alike, "token": None, "texts": None}
        turns = [(each.turns[turn], each.branches) for each in (first, second)]
        ids = [branches[part.branch].input_ids[part.start : part.end] for part, branches in turns]
        token = common_start(*ids)
        if token < max(len(ids[0]), len(ids[1])):
            texts = [texts_of(store).decode(each[token : token + _AROUND].tolist()) for each in ids]
            return {"turn": turn, "message": False, "token": token, "texts": texts}
        words = first.messages[replies[0][turn]].text, second.messages[replies[1][turn]].text
        if words[0] != words[1]:  # a backend that gives no ids
            return {"turn": turn, "message": False, "token": None, "texts": None}
        before = replies[0][turn] + 1
    raise AssertionError("the loop ends at the turn that one of them does not have")
