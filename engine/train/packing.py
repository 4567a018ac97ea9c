"""Training rows -> packs without padding, in which a prefix that several rows share is stored once.

    for pack in pack_rows(rows, 8192, share_prefixes=True):
        logprobs, _ = policy.forward(pack, entropy=False)  # [n]: pack.row, pack.token: the row and token of each

A pack is a forest of segments. A *segment* is a run of tokens that the same rows share; its parent is the segment
before it in those rows. A token attends to its own segment up to itself and to all ancestors of the segment. Its
position is its index in its row, so each row gets the same result as in a forward pass of its own.

    rows                 segments                       input_ids
    P P P a a            0: P P P   (no parent)         P P P a a b b b
    P P P b b b          1: a a     (parent 0)
                         2: b b b   (parent 0)

Invariants:
- Segments are in depth-first order: the descendants of a segment follow it in one contiguous range.
- A row ends before its last trained token: later tokens predict nothing that is trained.
- All placeholder tokens of an image are in one segment: rows with different pixels at them split before the image.
- Rows share a token only if the sampler chose the same experts for it in all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
from msgspec.structs import replace

from engine.errors import TrainError
from engine.schemas.base import Struct

if TYPE_CHECKING:
    from engine.store.rows.row import TrainingRow

MIN_SHARED_TOKENS = 16
"""Minimum number of tokens that sharing a prefix must save. A shorter prefix is computed again for each row."""

_HASH = np.uint64(0x9E3779B97F4A7C15)


class Segment(Struct, frozen=True):
    """Tokens [start, end) of a pack."""

    start: int
    end: int
    parent: int
    """Index of the segment before it; -1 for a segment at the start of its rows."""
    position: int
    """Index of its first token in its rows."""
    subtree_end: int
    """End of its last descendant; `end` if it has none."""


class PackImage(Struct, frozen=True):
    """An image of a pack."""

    image: str
    """Its digest."""
    start: int
    """The index of its first token in the pack."""
    grid: tuple[int, ...]
    """See `ImageSpan.grid`."""


class Pack(Struct, frozen=True, kw_only=True, eq=False):
    """One micro-batch: T tokens, of which n are predicted."""

    input_ids: torch.Tensor
    """int64 [T]."""
    position_ids: torch.Tensor
    """int64 [T]: index of each token in its rows."""
    segments: tuple[Segment, ...]
    rows: tuple[int, ...]
    """Indices of this pack's rows in the list given to `pack_rows`, ascending."""
    paths: tuple[tuple[int, ...], ...]
    """For each of `rows`: indices of its segments, in order."""
    sources: torch.Tensor
    """int64 [n]: index in the pack of the token whose hidden state predicts the label. Several rows may use the
    same."""
    labels: torch.Tensor
    """int64 [n]: ids of the trained tokens, ordered by row and then by token."""
    row: torch.Tensor
    """int64 [n]: index of the label's row in the list given to `pack_rows`."""
    token: torch.Tensor
    """int64 [n]: index of the label in its row."""
    images: tuple[PackImage, ...] = ()
    """The images, ordered by `start`. An image that rows share is listed once."""
    experts: torch.Tensor | None = None
    """int32 [T, layers, top_k]: the experts that the sampler chose for each token, -1 where not known. None: no row has
    any."""
    cache: dict[Any, Any] = msgspec.field(default_factory=dict)
    """Values computed once per pack and used in several passes: attention masks, position ids of a vision model."""

    @property
    def tokens(self) -> int:
        """T."""
        return len(self.input_ids)

    @property
    def longest(self) -> int:
        """Number of tokens of the longest row."""
        return max(segment.position + segment.end - segment.start for segment in self.segments)

    def row_tokens(self, number: int) -> torch.Tensor:
        """Indices in the pack of the tokens of `rows[number]`, in the row's order. int64 [tokens]."""
        parts = [torch.arange(self.segments[index].start, self.segments[index].end) for index in self.paths[number]]
        return torch.cat(parts)


class _RowTokens(Struct, frozen=True, kw_only=True, eq=False):
    """The tokens of a row that a forward pass needs."""

    row: int
    ids: np.ndarray
    keys: np.ndarray
    """uint64 [tokens]: the id in the lower 32 bits, the number of its image (0: none) in the upper 32 bits. With
    experts, their hash is added: different experts have different keys in nearly all cases."""
    trained: np.ndarray
    """Indices of the trained tokens."""
    images: list[PackImage]
    """The images; `start` is an index in the row."""
    experts: np.ndarray | None
    """int32 [tokens, layers, top_k], -1 where not known; None: no row has any."""


def pack_rows(
    rows: Sequence[TrainingRow],
    max_tokens_per_microbatch: int,
    *,
    share_prefixes: bool,
    min_shared_tokens: int = MIN_SHARED_TOKENS,
) -> list[Pack]:
    """Pack rows into packs of at most `max_tokens_per_microbatch` tokens. A longer row is a pack of its own.

    Rows with a common prefix are put in the same pack if they fit. A row without trained tokens is dropped. A token
    that is trained in several rows has one label for each of them.

    Args:
        rows: The rows. A place right after the last token is that of the last state: its label is any id.
        max_tokens_per_microbatch: Maximum tokens of a pack; shared tokens count once.
        share_prefixes: Store common prefixes once. If false, each row is a segment of its own.
        min_shared_tokens: Minimum number of tokens that a shared prefix must save, over all rows that share it.

    Returns:
        The packs. Each row with trained tokens is in exactly one of them.

    Raises:
        TrainError: kind `train_setup`: the first token of a row is trained, and no token predicts it; or rows have
            experts of different models.
    """
    numbers: dict[str, int] = {}
    form = next((row.branch.routed_experts.shape[1:] for row in rows if row.branch.routed_experts is not None), None)
    lines = [line for index, row in enumerate(rows) if (line := _row_tokens(index, row, numbers, form)) is not None]
    # Sorted by tokens, rows with long common prefixes are neighbours.
    lines.sort(key=lambda line: (line.keys.astype(">u8").tobytes(), line.row))
    common = [0] + [_common_prefix(one, other) for one, other in pairwise(lines)]
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
        while pack.tokens > max_tokens_per_microbatch and end - begin > 1:  # prefixes that are too short to be shared
            end -= 1
            pack = _build_pack(lines[begin:end], common[begin:end], share_prefixes, min_shared_tokens)
        packs.append(pack)
        begin = end
    return packs


def _row_tokens(
    index: int, row: TrainingRow, numbers: dict[str, int], form: tuple[int, ...] | None
) -> _RowTokens | None:
    trained = row.places
    if not len(trained):
        return None
    if trained[0] == 0:
        raise TrainError(
            f"row {index}: its first token is trained, but no token comes before it to predict it", kind="train_setup"
        )
    end = int(trained[-1])
    ids = row.branch.input_ids.astype(np.int64)
    if end == len(ids):
        ids = np.append(ids, ids[:1])
    keys = ids[:end].astype(np.uint64)
    images = []
    for image in row.branch.images:
        if image.start < end:
            number = numbers.setdefault(image.image, len(numbers) + 1)
            keys[image.start : image.end] |= np.uint64(number << 32)
            images.append(PackImage(image.image, image.start, tuple(image.grid)))
    experts, given = None, row.branch.routed_experts
    if form is not None:
        experts = np.full((end, *form), -1, np.int32)
        if given is not None and given.shape[1:] != form:
            raise TrainError(
                f"row {index}: its experts are of {given.shape[1:]} [layers, top_k], and those of other rows of "
                f"{form}: were they sampled with another model?",
                kind="train_setup",
            )
        if given is not None:
            experts[: len(given)] = given[:end]
        hashed = np.zeros(end, np.uint64)
        for choice in experts.reshape(end, -1).T:
            hashed = (hashed ^ choice.astype(np.uint64)) * _HASH
        keys += hashed
    return _RowTokens(row=index, ids=ids, keys=keys, trained=trained, images=images, experts=experts)


def _common_prefix(one: _RowTokens, other: _RowTokens) -> int:
    """Length of the common prefix."""
    length = min(len(one.keys), len(other.keys))
    apart = np.flatnonzero(one.keys[:length] != other.keys[:length])
    length = int(apart[0]) if len(apart) else length
    if one.experts is None or other.experts is None:
        return length
    # Equal sums of ids and hashes are not yet equal ids and experts.
    same = one.ids[:length] == other.ids[:length]
    same &= (one.experts[:length] == other.experts[:length]).all((1, 2))
    apart = np.flatnonzero(~same)
    return int(apart[0]) if len(apart) else length


def _build_segments(
    lines: list[_RowTokens], common: list[int], share: bool, min_shared_tokens: int
) -> tuple[list[Segment], list[Any]]:
    """The segments in depth-first order (without `subtree_end`), and the segments of each row."""
    segments: list[Segment] = []
    paths: list[tuple[int, ...]] = [()] * len(lines)
    at = 0
    # Rows [low, high) whose first `depth` tokens are in the segments `path`; their other tokens have no segment yet.
    todo: list[tuple[int, int, int, tuple[int, ...]]] = [(0, len(lines), 0, ())]
    if not share:
        todo = [(number, number + 1, 0, ()) for number in reversed(range(len(lines)))]
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
        todo += [(cuts[i], cuts[i + 1], depth, path) for i in reversed(range(len(cuts) - 1))]
    return segments, paths


def _build_pack(lines: list[_RowTokens], common: list[int], share: bool, min_shared_tokens: int) -> Pack:
    segments, paths = _build_segments(lines, common, share, min_shared_tokens)
    for index in reversed(range(len(segments))):
        segment = segments[index]
        if segment.parent >= 0:
            above = segments[segment.parent]
            segments[segment.parent] = replace(above, subtree_end=max(above.subtree_end, segment.subtree_end))
    ids = np.empty(segments[-1].end, np.int64)
    positions = np.empty(len(ids), np.int64)
    images: dict[int, PackImage] = {}
    form = None if lines[0].experts is None else lines[0].experts.shape[1:]
    experts = None if form is None else np.empty((len(ids), *form), np.int32)
    places: list[np.ndarray] = []
    for line, path in zip(lines, paths, strict=True):
        place = np.empty(len(line.keys), np.int64)
        for index in path:
            start, end, position = segments[index].start, segments[index].end, segments[index].position
            stop = position + end - start
            ids[start:end] = line.ids[position:stop]
            if experts is not None and line.experts is not None:
                experts[start:end] = line.experts[position:stop]
            positions[start:end] = place[position:stop] = np.arange(position, stop)
            place[position:stop] += start - position
        for image in line.images:
            start = int(place[image.start])
            images[start] = replace(image, start=start)
        places.append(place)
    order = sorted(range(len(lines)), key=lambda number: lines[number].row)
    trained = [lines[number].trained for number in order]
    return Pack(
        input_ids=torch.from_numpy(ids),
        position_ids=torch.from_numpy(positions),
        segments=tuple(segments),
        rows=tuple(lines[number].row for number in order),
        paths=tuple(paths[number] for number in order),
        sources=_concatenated([places[number][tokens - 1] for number, tokens in zip(order, trained, strict=True)]),
        labels=_concatenated([lines[number].ids[tokens] for number, tokens in zip(order, trained, strict=True)]),
        row=_concatenated(
            [np.full(len(tokens), lines[number].row) for number, tokens in zip(order, trained, strict=True)]
        ),
        token=_concatenated(trained),
        images=tuple(images[start] for start in sorted(images)),
        experts=None if experts is None else torch.from_numpy(experts),
    )


def _concatenated(parts: Sequence[np.ndarray]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(parts).astype(np.int64))
