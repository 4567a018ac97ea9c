"""Training rows -> packs: one sequence of tokens each, without padding, in which common beginnings stand once.

    for pack in pack_rows(rows, 8192, share_prefixes=True):
        logprobs, _ = policy.forward(pack, entropy=False)      # [n]: pack.row and pack.token say whose each is

A pack is a forest. A *segment* is a run of tokens that the same rows share; its parent is what stands before it. A
token attends to its own segment up to itself and to all of the segment's ancestors, and its position is its place in
its row, so that each row is computed as if it were alone.

    rows                 segments                       input_ids
    P P P a a            0: P P P   (no parent)         P P P a a b b b
    P P P b b b          1: a a     (parent 0)
                         2: b b b   (parent 0)

Invariants:
- Segments stand in depth-first order: what descends from a segment follows it in one range.
- What follows a row's last trained token predicts nothing, and that token itself is only predicted: neither is here.
- An image stands in one segment as a whole: rows with other pixels at the same placeholders part before them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from engine.errors import TrainError

MIN_SHARED_TOKENS = 16
"""Tokens that sharing a beginning must save: a shorter one is computed again in each row."""

Row = Mapping[str, Any]
"""What `engine.store.export` yields; read here: `input_ids`, `loss_mask`, `images`."""


class Segment(NamedTuple):
    """Tokens [start, end) of a pack."""

    start: int
    end: int
    parent: int
    """Index of the segment that stands before it; -1 where it begins its rows."""
    position: int
    """Of its first token in its rows."""
    subtree_end: int
    """End of the last segment that descends from it; `end` where none does."""


class PackImage(NamedTuple):
    """An image of a pack; `start` is where its tokens begin."""

    image: str
    start: int


@dataclass(frozen=True, slots=True)
class Pack:
    """One micro-batch: T tokens, of which n are predicted."""

    input_ids: torch.Tensor
    """int64 [T]."""
    position_ids: torch.Tensor
    """int64 [T]: each token's place in its rows."""
    segments: tuple[Segment, ...]
    rows: tuple[int, ...]
    """The rows of this pack, as indices of the list given, ascending."""
    paths: tuple[tuple[int, ...], ...]
    """Of each of `rows`: its segments in order."""
    sources: torch.Tensor
    """int64 [n]: the place in the pack whose hidden state predicts the token; one place may serve several rows."""
    labels: torch.Tensor
    """int64 [n]: the trained tokens' ids, rows in order, tokens in order."""
    row: torch.Tensor
    """int64 [n]: index of the row in the list given."""
    token: torch.Tensor
    """int64 [n]: index of the token in its row."""
    images: tuple[PackImage, ...] = ()
    """In the order of their places; one that rows share is here once."""
    cache: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)
    """What is made of the pack once for several passes: masks, position ids of a model that sees."""

    @property
    def tokens(self) -> int:
        """T."""
        return len(self.input_ids)

    @property
    def trained(self) -> int:
        """n."""
        return len(self.labels)

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return max(segment.position + segment.end - segment.start for segment in self.segments)

    def row_tokens(self, number: int) -> torch.Tensor:
        """Places in the pack of the tokens of `rows[number]`, in the row's order. int64 [tokens]."""
        parts = [torch.arange(self.segments[index].start, self.segments[index].end) for index in self.paths[number]]
        return torch.cat(parts)


class _RowTokens(NamedTuple):
    """A row as far as it is computed."""

    row: int
    ids: np.ndarray
    keys: np.ndarray
    """uint64 [tokens]: the id, and in the upper half which image it belongs to."""
    trained: np.ndarray
    """Places of the trained tokens."""
    images: list[tuple[str, int]]


def pack_rows(
    rows: Sequence[Row],
    max_tokens_per_microbatch: int,
    *,
    share_prefixes: bool,
    min_shared_tokens: int = MIN_SHARED_TOKENS,
) -> list[Pack]:
    """Rows -> packs of at most `max_tokens_per_microbatch` tokens; a longer row goes alone.

    Rows that begin alike come into the same pack where they can. A row in which nothing is trained is left out. A
    token that several rows share and that is trained in several of them is predicted once for each of them.

    Args:
        rows: As `export_rows` gives them.
        max_tokens_per_microbatch: The budget, counting what is shared once.
        share_prefixes: Compute common beginnings once; else each row is a segment of its own.
        min_shared_tokens: Tokens that a shared beginning must save, over all the rows that have it.

    Raises:
        TrainError: A row's first token is trained: nothing predicts it.
    """
    numbers: dict[str, int] = {}
    lines = [line for index, row in enumerate(rows) if (line := _row_tokens(index, row, numbers)) is not None]
    # In the order of their tokens, rows with the longest common beginnings are neighbours.
    lines.sort(key=lambda line: (line.keys.astype(">u8").tobytes(), line.row))
    common = [0] + [_common_prefix(one.keys, other.keys) for one, other in pairwise(lines)]
    packs, begin = [], 0
    while begin < len(lines):
        end, tokens = begin, 0
        while end < len(lines):
            shared = common[end] if share_prefixes and end > begin else 0
            tokens += len(lines[end].keys) - shared
            if tokens > max_tokens_per_microbatch and end > begin:
                break
            end += 1
        pack = _build_pack(lines[begin:end], common[begin:end], share_prefixes, min_shared_tokens)
        while pack.tokens > max_tokens_per_microbatch and end - begin > 1:  # beginnings too short to be shared
            end -= 1
            pack = _build_pack(lines[begin:end], common[begin:end], share_prefixes, min_shared_tokens)
        packs.append(pack)
        begin = end
    return packs


def _row_tokens(index: int, row: Row, numbers: dict[str, int]) -> _RowTokens | None:
    trained = np.flatnonzero(np.asarray(row["loss_mask"]))
    if not len(trained):
        return None
    if trained[0] == 0:
        raise TrainError(f"row {index}: its first token is trained, and nothing predicts it", kind="train_setup")
    end = int(trained[-1])
    ids = np.asarray(row["input_ids"], np.int64)
    keys = ids[:end].astype(np.uint64)
    images = []
    for image in row.get("images") or ():
        if image["start"] < end:
            number = numbers.setdefault(image["image"], len(numbers) + 1)
            keys[image["start"] : image["end"]] |= np.uint64(number << 32)
            images.append((str(image["image"]), int(image["start"])))
    return _RowTokens(index, ids, keys, trained, images)


def _common_prefix(one: np.ndarray, other: np.ndarray) -> int:
    """Length of the common beginning."""
    length = min(len(one), len(other))
    apart = np.flatnonzero(one[:length] != other[:length])
    return int(apart[0]) if len(apart) else length


class _PendingRows(NamedTuple):
    """Lines [low, high), which have their first `depth` tokens on `path`; the rest is still to be placed."""

    low: int
    high: int
    depth: int
    path: tuple[int, ...]


def _build_segments(
    lines: list[_RowTokens], common: list[int], share: bool, min_shared_tokens: int
) -> tuple[list[Segment], list[Any]]:
    """The segments in depth-first order (`subtree_end` still to be found), and each line's path."""
    segments: list[Segment] = []
    paths: list[tuple[int, ...]] = [()] * len(lines)
    at = 0
    todo = [_PendingRows(0, len(lines), 0, ())]
    if not share:
        todo = [_PendingRows(number, number + 1, 0, ()) for number in reversed(range(len(lines)))]
    while todo:
        low, high, depth, path = todo.pop()
        alone = high - low == 1
        shared = len(lines[low].keys) if alone else min(common[low + 1 : high])
        if shared > depth and (alone or (shared - depth) * (high - low - 1) >= min_shared_tokens):
            parent = path[-1] if path else -1
            path = (*path, len(segments))
            segments.append(Segment(at, at + shared - depth, parent, depth, at + shared - depth))
            at, depth = at + shared - depth, shared
        if alone:
            paths[low] = path
            continue
        cuts = [low, *(place for place in range(low + 1, high) if common[place] == shared), high]
        todo += [_PendingRows(cuts[i], cuts[i + 1], depth, path) for i in reversed(range(len(cuts) - 1))]
    return segments, paths


def _build_pack(lines: list[_RowTokens], common: list[int], share: bool, min_shared_tokens: int) -> Pack:
    segments, paths = _build_segments(lines, common, share, min_shared_tokens)
    for index in reversed(range(len(segments))):
        segment = segments[index]
        if segment.parent >= 0:
            above = segments[segment.parent]
            segments[segment.parent] = above._replace(subtree_end=max(above.subtree_end, segment.subtree_end))
    ids = np.empty(segments[-1].end, np.int64)
    positions = np.empty(len(ids), np.int64)
    images: dict[int, str] = {}
    places: list[np.ndarray] = []
    for line, path in zip(lines, paths, strict=True):
        place = np.empty(len(line.keys), np.int64)
        for index in path:
            start, end, _, position, _ = segments[index]
            stop = position + end - start
            ids[start:end] = line.ids[position:stop]
            positions[start:end] = place[position:stop] = np.arange(position, stop)
            place[position:stop] += start - position
        images |= {int(place[start]): image for image, start in line.images}
        places.append(place)
    order = sorted(range(len(lines)), key=lambda number: lines[number].row)
    trained = [lines[number].trained for number in order]
    return Pack(
        input_ids=torch.from_numpy(ids),
        position_ids=torch.from_numpy(positions),
        segments=tuple(segments),
        rows=tuple(lines[number].row for number in order),
        paths=tuple(paths[number] for number in order),
        sources=_concatenated([places[number][found - 1] for number, found in zip(order, trained, strict=True)]),
        labels=_concatenated([lines[number].ids[found] for number, found in zip(order, trained, strict=True)]),
        row=_concatenated(
            [np.full(len(found), lines[number].row) for number, found in zip(order, trained, strict=True)]
        ),
        token=_concatenated(trained),
        images=tuple(PackImage(images[start], start) for start in sorted(images)),
    )


def _concatenated(parts: Sequence[np.ndarray]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(parts).astype(np.int64))
