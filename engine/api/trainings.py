"""A spec with a section `train` -> a training that is stored. `engine train` is built on this.

    training = engine.fit("train.yaml", {"train.steps": 20})      # blocks, in a notebook too
    training = await engine.fit_async(spec)                       # in an event loop of one's own
    training.metrics                                              # pyarrow.Table, one row per step
    training.run.episodes[0].messages

Invariant: what ends a launch, be it an error or an interrupt, leaves its training so that `resume` continues it.
"""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import Mapping
from functools import partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from engine.api.launch import blocking, finished
from engine.api.progress import Progress, TrainPanel, progress_of, spark
from engine.api.runs import Run
from engine.api.runs import open as open_run
from engine.api.specs import Overrides, load, texts_of
from engine.errors import EngineError, TrainError
from engine.logs import configure_logging
from engine.runner.processes import processes_of
from engine.spec.load import LoadedSpec, override_spec
from engine.store import training as folders
from engine.store.header import RunHeader, new_run_id
from engine.store.lock import is_held
from engine.train.checkpoint import checkpoints_of
from engine.train.distributed import ProcessGroup, join_process_group
from engine.train.metrics import read_metrics
from engine.train.setup import check_changes, follow, train_spec_of, with_precision
from engine.train.trainer import Trainer
from engine.validate import refuse_errors

if TYPE_CHECKING:
    import pyarrow as pa

    from engine.train.step_source import TrainResult


class Training:
    """A stored training. Made by `engine.fit`; `Training(folder)` opens one."""

    def __init__(self, folder: str | Path, result: TrainResult | None = None) -> None:
        self.folder = Path(folder)
        """The training's folder; docs/training.md has its files."""
        self.result = result
        """How this launch ended: steps, best evaluation, interrupted; None for a training that was only opened."""

    @property
    def spec(self) -> LoadedSpec:
        """The spec that it is made with."""
        return folders.read_header(self.folder).loaded_spec()

    @property
    def metrics(self) -> pa.Table:
        """The metrics, one row per step, with the names of docs/training.md; null where a step has none."""
        import pyarrow as pa

        lines = read_metrics(self.folder)
        names = dict.fromkeys(name for line in lines for name in line)
        return pa.table({name: pa.array([line.get(name) for line in lines]) for name in names})

    @property
    def checkpoints(self) -> list[Path]:
        """The folders of the stored checkpoints, the oldest first; `model/` of each is a model for `model.path`."""
        return checkpoints_of(self.folder)

    @property
    def run(self) -> Run:
        """The episodes that it sampled. Raises: StoreError: it samples none (`train.kind: sft`)."""
        return open_run(self.folder / folders.ROLLOUTS)

    def __repr__(self) -> str:
        return f"<Training {self.folder.name}: {len(read_metrics(self.folder))} steps>"

    def _repr_html_(self) -> str:
        lines = [line for line in read_metrics(self.folder) if line["step"]]
        cells = {"training": self.folder.name, "steps": len(lines)}
        for name in ("reward/mean", "episode/solved", "loss"):
            if values := [line[name] for line in lines if name in line]:
                cells[name] = f"{values[0]:.3f} → {values[-1]:.3f} {spark(values)}"
        if checkpoints := self.checkpoints:
            cells["checkpoint"] = checkpoints[-1].name
        rows = "".join(f"<tr><th>{name}</th><td>{escape(str(value))}</td></tr>" for name, value in cells.items())
        return f"<table>{rows}</table>"


class TrainingLaunch:
    """A training that is about to begin or to go on: its checked spec and its folder.

    Args:
        loaded: The spec.
        folder: The training's folder, with its header.
        process_group: The processes of the training, of which this is the first.
        is_new: Whether an error removes a folder in which nothing was stored yet.
    """

    def __init__(self, loaded: LoadedSpec, folder: Path, process_group: ProcessGroup, *, is_new: bool) -> None:
        self.loaded = loaded
        self.folder = folder
        self.train = train_spec_of(loaded)
        self._process_group = process_group
        self._is_new = is_new

    @classmethod
    def of(
        cls,
        spec: str | Path | LoadedSpec | None = None,
        overrides: Overrides = (),
        *,
        out: str | Path | None = None,
        resume: str | Path | None = None,
        name: str | None = None,
        progress: Progress | bool = True,
    ) -> TrainingLaunch:
        """Check a spec, and make the folder of its training; or find a training to continue it.

        The arguments are those of `fit_async`. In a process other than the first one of a launcher this serves the
        first one until it ends, and exits.

        Raises:
            TrainError: the training cannot begin or go on.
            EngineError: the spec has errors.
            ValueError: neither a spec nor a training is given, or both are.
        """
        if name is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
            raise TrainError(
                f"the name {name!r}: use letters, digits, `.`, `_` and `-`, and begin with a letter or a digit",
                kind="train_setup",
            )
        if resume == "auto" and (spec is None or name is None):
            raise ValueError("`auto` needs a spec and a name")
        if (resume != "auto" and (spec is None) == (resume is None)) or (spec is None and name is not None):
            raise ValueError("give a spec, or a training to resume, which has its own spec and name")
        shown, changes = progress_of(progress), texts_of(overrides)
        group = join_process_group()
        if not group.main:
            _serve(group, spec, changes, Path(out or "runs"), resume)
        if spec is None:
            return cls._resumed(folders.find_training(str(resume), Path(out or "runs")), None, changes, group, shown)
        loaded = load(spec, changes)
        place = Path(out or loaded.spec.rollout.out)
        if name is not None and (begun := folders.named(name, place)) is not None:
            if resume is None:
                raise TrainError(
                    f'the training {begun} exists: `--resume auto`, in Python `resume="auto"`, continues it',
                    kind="train_setup",
                )
            return cls._resumed(begun, loaded, changes, group, shown)
        _check(loaded, shown)
        loaded = with_precision(loaded)
        train_spec_of(loaded)
        header = RunHeader.of(loaded, overrides=changes, run_id=name or new_run_id(f"{loaded.spec.name}-train"))
        return cls(loaded, folders.begin(place, header), group, is_new=True)

    @classmethod
    def _resumed(
        cls, folder: Path, loaded: LoadedSpec | None, changes: list[str], group: ProcessGroup, progress: Progress
    ) -> TrainingLaunch:
        """Continue a training, with the values that are changed written into its header."""
        header = folders.read_header(folder)
        loaded = _changed(header, changes) if loaded is None else with_precision(loaded, header.loaded_spec().spec)
        if changed := check_changes(header.loaded_spec(strict=True).spec, loaded.spec):
            if is_held(folder) or is_held(folder / folders.ROLLOUTS):
                raise TrainError(
                    f"another process trains in {folder}: wait until it ends, or stop it", kind="train_setup"
                )
            _check(loaded, progress)
            new = RunHeader.of(loaded, overrides=[*header.overrides, *changes], run_id=header.run_id)
            folders.write_header(folder, new.model_copy(update={"created": header.created}))
            progress.say(f"Changed: {', '.join(changed)}")
        return cls(loaded, folder, group, is_new=False)

    async def run(
        self, *, keep_going: bool = False, progress: Progress | bool = True, stop: asyncio.Event | None = None
    ) -> Training:
        """Train to the last step. A cancellation stops as `stop` does.

        Args:
            keep_going: Do not stop if the first 16 episodes all fail with one cause.
            progress: What shows how the training goes on; see `Progress`.
            stop: Setting it ends the training early: with a checkpoint, and running episodes in the store.

        Raises:
            EngineError: the training cannot begin or go on. If nothing was stored, a new folder is removed.
        """
        if not structlog.is_configured():
            configure_logging()
        shown, panel = progress_of(progress), TrainPanel(self.train.steps)

        def on_step(step: int, values: Mapping[str, float]) -> None:
            panel.update(step, values)
            shown.step(panel.step_line())

        trainer = Trainer(
            self.loaded,
            self.folder,
            process_group=self._process_group,
            on_step=on_step,
            phase=panel.phase,
            watch=partial(setattr, panel, "live"),
            keep_going=keep_going,
        )
        shown.say(f"loading {self.loaded.spec.model.path} …")
        stop = stop or asyncio.Event()
        try:
            with shown.watching(panel):
                result = await finished(trainer.run(stop=stop), stop)
        except EngineError:
            if self._is_new:
                folders.discard(self.folder)
            raise
        finally:
            for line in trainer.last_lines:
                shown.say(line)
        self._process_group.close()
        return Training(self.folder, result)


def _changed(header: RunHeader, changes: list[str]) -> LoadedSpec:
    """The spec of a training, with the values that a resume changes."""
    loaded = header.loaded_spec(strict=True)
    return with_precision(override_spec(loaded, changes), loaded.spec) if changes else loaded


def _check(loaded: LoadedSpec, progress: Progress) -> None:
    """Check a spec with the rules of `engine validate`, and show its warnings. Raises: SpecError."""
    if (processes := processes_of(loaded)) is not None:
        processes.refuse_training()
    for item in refuse_errors(loaded):
        progress.warn(str(item))


def _serve(
    group: ProcessGroup, spec: str | Path | LoadedSpec | None, changes: list[str], out: Path, resume: str | Path | None
) -> None:
    """In a process other than the first: run the calls of the first one, and exit when it ends. Ctrl-C and SIGTERM,
    which a launcher sends to all, are left to the first one."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if spec is not None:
        loaded = with_precision(load(spec, changes))
    else:
        loaded = _changed(folders.read_header(folders.find_training(str(resume), out)), changes)
    follow(loaded, group)
    raise SystemExit(0)


async def fit_async(
    spec: str | Path | LoadedSpec | None = None,
    overrides: Overrides = (),
    *,
    out: str | Path | None = None,
    resume: str | Path | None = None,
    name: str | None = None,
    keep_going: bool = False,
    progress: Progress | bool = True,
) -> Training:
    """Train the spec's model. The form of `fit` for an event loop of one's own.

    Args:
        spec: A file, or a spec that is loaded, with a section `train`. None with `resume`: the training has its own.
        overrides: See `load`. With `resume`: values that a resumed training may change.
        out: Folder in which trainings are stored; by default the spec's `rollout.out`.
        resume: The training to continue: a folder, an id, the beginning of one, or `latest`. `auto`, with a spec and
            `name`: continue the training of that name, or begin it if there is none.
        name: Name of the training's folder; by default from the spec's name and the time.
        keep_going: Do not stop if the first 16 episodes all fail with one cause.
        progress: False shows nothing; or a `Progress` of one's own.

    Raises:
        EngineError: the spec has errors, or the training cannot begin or go on.
        ValueError: neither a spec nor a training is given, or both are.
    """
    shown = progress_of(progress)
    launch = TrainingLaunch.of(spec, overrides, out=out, resume=resume, name=name, progress=shown)
    return await launch.run(keep_going=keep_going, progress=shown)


fit = blocking(
    fit_async,
    "fit",
    """Train the spec's model. The arguments and errors are those of `fit_async`.

    Where an event loop runs, as in a notebook, the training has a thread of its own. Ctrl-C stops it cleanly, and is
    raised when the last state is stored; `resume` goes on.
    """,
)
