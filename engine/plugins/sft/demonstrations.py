"""The rows of a training on written episodes (`train.kind: sft`). Those of a step depend on files, `train.data`,
`train.seed` and the step alone.

    data = Demonstrations(loaded)          # reads all files once
    data.rows(data.batch(step=0, most=None))

An episode is used as a whole: all rows (branches) that `engine export` wrote for it. Each sampled token of an episode
is in one of them. Rows stay in their files; the index has a few bytes per row. Rows of a chat API have no ids: they are
rendered for the model, in memory.

Invariants:
- The episodes of a step depend on the files, `train.data`, `train.seed` and the step alone, so a resumed training has
  the same.
- A row is trained on at most once per epoch: a copy in another file is left out, and counted.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import structlog

from engine.errors import TrainError
from engine.plugins.sft.rendered_rows import rendered
from engine.plugins.sft.row_facts import RowFacts, facts_of, open_rows
from engine.plugins.sft.spec import SUFFIXES, SftDataSpec
from engine.schemas.experts import unpack_experts
from engine.schemas.trajectory import ImageSpan
from engine.spec.rows.row import RowFault, Rows
from engine.store.loader import images_folder, tensor_file, tensors_beside
from engine.store.rows.row import RowEpisode, TrainingRow
from engine.tokens.loading import load_format

if TYPE_CHECKING:
    from engine.schemas.train import TrainSpec
    from engine.spec.load import LoadedSpec
    from engine.store.rows.columns import Columns
    from engine.tokens.images import Tensors
    from engine.tokens.template import ChatTemplate

log = structlog.get_logger(__name__)

PATH = ("train", "data", "path")
_known: dict[str, Demonstrations] = {}
"""The newest demonstrations by the files, their times and the settings that they depend on."""


def data_of(loaded: LoadedSpec) -> SftDataSpec:
    """The spec's `train.data`. Raises: TrainError: kind `train_setup`: there is none."""
    data = SftDataSpec.section_of(_train_of(loaded))
    if data is None:
        raise TrainError(f"{loaded.path}: the spec has no `train.data`", kind="train_setup")
    return data


def _train_of(loaded: LoadedSpec) -> TrainSpec:
    assert loaded.spec.train is not None
    return loaded.spec.train


def demonstrations(loaded: LoadedSpec) -> Demonstrations:
    """The rows of a spec's `train.data`, read once while the files do not change.

    Raises:
        TrainError: as `Demonstrations`.
    """
    data, train = data_of(loaded), _train_of(loaded)
    stamps = [(str(file), file.stat().st_mtime_ns, file.stat().st_size) for file in files_of(loaded)]
    key = repr((stamps, data, train.shuffle, train.seed, loaded.spec.model))
    if key not in _known:
        _known.clear()
        _known[key] = Demonstrations(loaded)
    return _known[key]


def files_of(loaded: LoadedSpec) -> list[Path]:
    """The files that `train.data.path` names, those of a folder sorted by name.

    Raises:
        TrainError: kind `train_setup`: one does not exist, or is not a file of `engine export`.
    """
    named = data_of(loaded).path
    files: list[Path] = []
    for number, name in enumerate([named] if isinstance(named, str) else named):
        at = PATH if isinstance(named, str) else (*PATH, number)
        path = loaded.resolve(name, at)
        if path.is_dir():
            paths = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES)
        else:
            paths = [path] if path.is_file() else []
        if not paths or any(file.suffix not in SUFFIXES for file in paths):
            what = "is not a file of `engine export`" if paths else "does not exist, or is a folder without such files"
            raise TrainError(
                f"{loaded.origin(at)}: `train.data.path`: {path} {what}; write rows with "
                "`engine export RUN --format jsonl`",
                kind="train_setup",
            )
        files += paths
    return files


_Place = tuple[int, int]
"""Where a row is: the number of its file, and its position there."""


class Demonstrations:
    """The episodes of `train.data`, in the order of their first rows.

    Args:
        loaded: The spec.

    Raises:
        TrainError: kind `train_setup`: a file cannot be read, or a row is not a row of `engine export`; kind `no_data`:
            no row can be trained on.
    """

    def __init__(self, loaded: LoadedSpec) -> None:
        self._data, train = data_of(loaded), _train_of(loaded)
        self._shuffle, self._seed = train.shuffle, train.seed
        self.files = files_of(loaded)
        self._episodes: list[tuple[_Place, ...]] = []
        self.left_out: Counter[str] = Counter()
        """Number of rows that are not trained on, by reason."""
        template = cache(lambda: load_format(loaded.spec.model, loaded.base))
        self._sources = [self._open(file, template) for file in self.files]
        self.longest = 0
        """Tokens of the longest row."""
        self.largest_id = 0
        self.tokens = 0
        """Number of trained tokens of one epoch."""
        self._images: dict[str, int] = {}
        """Digests of all images, with the number of the first file that has each."""
        self._round, self._order = -1, list[int]()
        self.digest = self._read()
        """Digest of all rows that are trained on, in order. Trainings with equal digests have the same rows."""
        if not self._episodes:
            raise TrainError(f"`train.data` has no row to train on: {self.summary()}", kind="no_data")

    def __len__(self) -> int:
        return len(self._episodes)

    @property
    def row_count(self) -> int:
        """Number of rows of one epoch."""
        return sum(map(len, self._episodes))

    def summary(self) -> str:
        """One line: what is trained on and what is left out."""
        parts = [
            f"{len(self)} episodes, {self.row_count} rows, {self.tokens} trained tokens of {len(self.files)} files"
        ]
        parts += [
            f"{count} {'' if why.startswith('replies') else 'rows '}left out: {why}"
            for why, count in sorted(self.left_out.items())
        ]
        return "; ".join(parts)

    def _open(self, file: Path, template: Callable[[], ChatTemplate]) -> Rows:
        """The rows of a file, with ids also where it has only messages."""
        try:
            return rendered(open_rows(file), template, self.left_out)
        except (RowFault, OSError, KeyError, TypeError, ValueError) as error:
            raise TrainError(f"{file}: {error}", kind="train_setup") from error

    def _read(self) -> str:
        places: dict[tuple[int, str, str], list[_Place]] = {}
        seen: set[str] = set()
        digest = blake2b(digest_size=16)
        for number, (file, rows) in enumerate(zip(self.files, self._sources, strict=True)):
            try:
                for position, row in enumerate(facts_of(file, rows)):
                    reason = self._reason(row)
                    if reason is None:
                        reason = "copies of other rows" if row.identity in seen else None
                        seen.add(row.identity)
                    if reason is not None:
                        self.left_out[reason] += 1
                        continue
                    digest.update(bytes.fromhex(row.identity))
                    self.longest, self.largest_id = max(self.longest, row.tokens), max(self.largest_id, row.largest_id)
                    self.tokens += row.trained
                    for image in row.images:
                        self._images.setdefault(image, number)
                    places.setdefault((number, row.run, row.episode), []).append((number, position))
            except (RowFault, OSError) as error:
                raise TrainError(f"{file}: {error}", kind="train_setup") from error
        self._episodes = [tuple(episode) for episode in places.values()]
        return digest.hexdigest()

    def _reason(self, row: RowFacts) -> str | None:
        """Why a row is not trained on; None if it is."""
        if not row.trainable:
            return "not trainable"
        least, name = self._data.min_reward, self._data.reward
        if least is None:
            return None
        reward = row.reward if name is None else row.rewards.get(name)
        if reward is None:
            return f"no reward `{name}`" if name else "no reward"
        return None if reward >= least else f"reward below {least:g}"

    # --- order ----------------------------------------------------------------------------------------------

    def batch(self, step: int, most: int | None) -> list[int]:
        """The numbers of a step's episodes. Epoch e has the numbers from e × episodes on.

        Args:
            step: The step's number, from 0.
            most: Number of episodes of the whole training; None: unlimited.
        """
        size = self._data.episodes_per_step
        end = (step + 1) * size
        return list(range(step * size, end if most is None else min(end, most)))

    def rows(self, numbers: Sequence[int]) -> list[TrainingRow]:
        """The rows of episodes, by their numbers, as the learner reads them: each trained token has advantage 1.

        Raises:
            TrainError: kind `train_setup`: a file has changed since it was read first.
        """
        return [self._row(place) for number in numbers for place in self._episode(number)]

    def _episode(self, number: int) -> tuple[_Place, ...]:
        round_, place = divmod(number, len(self))
        if round_ != self._round:
            self._order = list(range(len(self)))
            if self._shuffle:
                random.Random(f"{self._seed}/{round_}").shuffle(self._order)
            self._round = round_
        return self._episodes[self._order[place]]

    def _row(self, place: _Place) -> TrainingRow:
        file, position = place
        try:
            fields = self._sources[file].row(position).fields
        except RowFault as error:
            raise TrainError(f"{self.files[file]}: {error}", kind="train_setup") from error
        experts = fields.get("routed_experts")
        return TrainingRow.of_tokens(
            fields["input_ids"],
            fields["loss_mask"],
            turn_ids=fields["turn_ids"],
            advantages=np.ones(len(fields["input_ids"])),
            images=[ImageSpan(**image) for image in fields.get("images", ())],
            routed_experts=None if experts is None else unpack_experts(experts),
            episode=RowEpisode(run_id=fields["run_id"], task_id=fields["task_id"], episode_id=fields["episode_id"]),
            index=fields["branch"],
        )

    # --- the model ------------------------------------------------------------------------------------------

    def check_model(self, template: ChatTemplate) -> None:
        """Check that the rows are of a model with this tokenizer, and give the image processor the tensors beside the
        files.

        Raises:
            TrainError: kind `train_setup`: ids or lengths are not of this model, or a row has images and the model
                none.
        """
        if self.largest_id >= template.vocab_size or (template.context is not None and self.longest > template.context):
            raise TrainError(
                f"`train.data`: the rows have ids up to {self.largest_id} and up to {self.longest} tokens; the model "
                f"has ids below {template.vocab_size} and a context of {template.context} tokens. Export rows of this "
                "model",
                kind="train_setup",
            )
        for number, rows in enumerate(self._sources):
            positions = (position for episode in self._episodes for file, position in episode if file == number)
            if (first := next(positions, None)) is not None:
                _check_text(rows.row(first).fields, template, self.files[number])
        if not self._images:
            return
        if template.vision is None:
            raise TrainError("`train.data`: rows have images, and the model has no vision", kind="train_setup")

        def read(digest: str) -> Tensors | None:
            return next((tensors for file in self.files if (tensors := tensors_beside(file, digest)) is not None), None)

        for digest, number in self._images.items():
            if not any(tensor_file(file, digest).is_file() for file in self.files):
                raise TrainError(
                    f"{self.files[number]}: the tensors of the image {digest} are missing; they are in the folder "
                    f"{images_folder(self.files[number]).name} beside the file, and move with it",
                    kind="train_setup",
                )
        template.vision.bank.read_tensors_from(read)


def _check_text(columns: Columns, template: ChatTemplate, file: Path) -> None:
    """Check that a row's ids, decoded, have the text of its first message of a user.

    Raises:
        TrainError: kind `train_setup`: they have not: the row is of a model with another tokenizer.
    """
    message: dict[str, Any] = next(
        (message for message in columns.get("messages") or [] if message["role"] == "user"), {}
    )
    content = message.get("content")
    listed = (
        content if isinstance(content, list) else message.get("parts") or []
    )  # `engine export --format sft` lists parts in `content`
    parts = [part["text"] for part in listed if part["type"] == "text"] or (
        [content] if isinstance(content, str) else []
    )
    text = next((part for part in parts if part), "")
    wanted, decoded = ("".join(words.split()) for words in (text, template.decode(columns["input_ids"])))
    if wanted in decoded or "***" in text or "${" in text:  # secrets are masked in messages
        return
    model = (columns.get("metadata") or {}).get("model", "another model")
    raise TrainError(
        f"{file}: the ids of {columns['episode_id']}, decoded with this model's tokenizer, do not contain the user's "
        f"message: the rows are of `{model}`. Train a model with the same tokenizer, or run the episodes again with "
        "this one",
        kind="train_setup",
    )
