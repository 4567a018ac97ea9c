"""A stored run -> its episodes, rows and sums, in Python.

    run = engine.open("latest")
    good = run.filter("outcome.solved && turns.assistant <= 4")
    good.rows()                       # pyarrow.Table, one row per branch
    run.episode("sum-0-0003/1").messages

Invariant: what is read here is what `engine show` and `engine export` read. A run that still goes on may be opened;
each question gets the newest answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from html import escape
from itertools import chain, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.errors import EngineError, StoreError
from engine.masking import mask
from engine.store import RunStore, find_run
from engine.store.episode_filter import EpisodeFilter
from engine.terminal import visible

if TYPE_CHECKING:
    import pandas
    import pyarrow as pa

    from engine.api.exports import Exported
    from engine.runner.summary import RunResult, RunSummary
    from engine.schemas.environment import Task
    from engine.schemas.message import Message
    from engine.schemas.trajectory import Trajectory, Turn
    from engine.spec.load import LoadedSpec
    from engine.store.reader import RunReader
    from engine.store.reading import EpisodeRow

SHOWN_EPISODES = 5
"""Episodes whose turns a notebook shows of a run."""
SHOWN_CHARACTERS = 200
"""Characters of a reply that it shows of a run; of an episode all are."""


class StoredEpisode:
    """One episode of a stored run. What it did is read when it is asked for."""

    def __init__(self, run: Run, row: EpisodeRow) -> None:
        self._run = run
        self.row = row
        """Its line in lists. What only a finished episode has is None before."""
        self.id = row.id
        """`<task>/<sample>`."""
        self.reward = row.reward
        """Sum over turns and names; None until it is done."""
        self.solved = row.solved
        """Whether the task was reported as solved; None until it is done."""
        self.failure = row.failure
        """The kind of the failure; None if there is none."""

    @cached_property
    def trajectory(self) -> Trajectory:
        """Everything that is stored of it: branches with ids, log-probs and masks, the ledger, the path, the outcome.

        Raises:
            StoreError: the episode is not done.
        """
        return self._run.store.trajectory(self.id)

    @property
    def task(self) -> Task:
        """Its task."""
        return self._run.store.task(self.row.task_id)

    @property
    def messages(self) -> Sequence[Message]:
        """The conversation. Raises: StoreError: the episode is not done."""
        return self.trajectory.messages

    @property
    def turns(self) -> Sequence[Turn]:
        """The assistant turns, with the rewards of each. Raises: StoreError: the episode is not done."""
        return self.trajectory.turns

    def __repr__(self) -> str:
        reward = "" if self.reward is None else f", reward {self.reward:+.3f}"
        return f"<Episode {self.id}: {self.failure or self.row.event or self.row.status}{reward}>"

    def _repr_html_(self) -> str:
        from engine.runner.summary import label

        done = self.row.status == "done"
        outcome = f": {label(self.trajectory.outcome)}" if done else ""
        return f"<div><p>{_escaped(f'{self!r}{outcome}')}</p>{_turns_table([self] if done else [])}</div>"


class Run:
    """A stored run. Made by `engine.run` and `engine.open`."""

    def __init__(self, store: RunReader, result: RunResult | None = None, *, expressions: Sequence[str] = ()) -> None:
        self.store = store
        self.id = store.run_id
        """The run's id, which is the name of its folder."""
        self.folder = store.folder
        """The run's folder."""
        self.result = result
        """How this launch ended: interrupted, or stopped by an error; None for a run that was only opened."""
        self._expressions = expressions

    @property
    def status(self) -> str:
        """`running`, `interrupted` or `done`."""
        return self.store.status

    @cached_property
    def spec(self) -> LoadedSpec:
        """The spec that the run was made with."""
        return self.store.loaded_spec()

    @cached_property
    def kept(self) -> frozenset[str] | None:
        """Ids of the episodes of this part of the run; None: it is the whole run."""
        if not self._expressions:
            return None
        return frozenset(trajectory.episode_id for trajectory in self.trajectories())

    @property
    def episodes(self) -> list[StoredEpisode]:
        """The episodes in the order of tasks and samples, those that are not done too; of a part of a run the finished
        ones for which it holds."""
        part = self.kept
        return [StoredEpisode(self, row) for row in self.store.episodes() if part is None or row.id in part]

    def episode(self, id: str) -> StoredEpisode:
        """One episode: `<task>/<sample>`. Raises: StoreError: there is none."""
        return StoredEpisode(self, self.store.episode(id))

    def filter(self, expression: str) -> Run:
        """The part of the run with the finished episodes for which this holds: CEL, as in `engine export --filter`.

        Raises:
            StoreError: the expression is not valid.
        """
        EpisodeFilter(self.store, expression)
        return Run(self.store, self.result, expressions=(*self._expressions, expression))

    def trajectories(self) -> Iterator[Trajectory]:
        """Every finished episode with all that is stored of it, a few in memory at a time."""
        return filter(self.keeps(), self.store.trajectories())

    def keeps(self) -> Callable[[Trajectory], bool]:
        """Whether a finished episode is in this part of the run."""
        filters = [EpisodeFilter(self.store, expression) for expression in self._expressions]
        return lambda trajectory: all(holds(trajectory) for holds in filters)

    @property
    def summary(self) -> RunSummary:
        """Sums over the finished episodes: outcomes, rewards by turn and name, failures by cause, time by state."""
        from engine.runner.summary import RunSummary

        summary = RunSummary()
        for trajectory in self.trajectories():
            summary.add(trajectory)
        return summary

    def rows(self, *, credit: Mapping[str, Any] | None = None, trainable_only: bool = False) -> pa.Table:
        """The training rows, one per branch, with the columns of docs/rows.md.

        Args:
            credit: Changes of the spec's credit method: `{"method": "turn_return", "gamma": 0.9}`.
            trainable_only: Leave out rows that are not trainable.
        """
        import pyarrow as pa

        from engine.api.exports import changed_credit
        from engine.store.rows.export import arrow_schema, export_rows, record_batches

        rows = export_rows(
            self.store,
            credit=None if credit is None else changed_credit(self.store, credit),
            trainable_only=trainable_only,
            keep=self.keeps(),
        )
        return pa.Table.from_batches(record_batches(rows), arrow_schema())

    def export(
        self,
        path: str | Path | None = None,
        *,
        format: str | None = None,
        trainable_only: bool = False,
        credit: Mapping[str, Any] | Sequence[str] = (),
        score: str | None = None,
        values: str | Path | None = None,
        episode: str | None = None,
        **added: Any,
    ) -> Exported:
        """Write a file, as `engine export` does.

        Args:
            path: The file; by default one in the run's folder.
            format: `jsonl`, `parquet` or `scenario`, or a plugin's; by default as the file's suffix says, else `jsonl`.
            trainable_only: Leave out rows that are not trainable.
            credit: Changes of the spec's credit method: `{"method": "turn_return"}`, or `["method=turn_return"]`.
            score: Use the rewards of this score of `engine rescore`.
            values: A file with a critic's values, for methods that need them.
            episode: With `scenario`: the episode. Its code runs.
            added: Options of plugins: `content="prompts"` is `--content prompts`.

        Raises:
            StoreError: there is no such format, an option has no effect with it, or the file cannot be written.
        """
        from engine.api.exports import export

        options = {
            "--filter": self._expressions,
            "--trainable-only": trainable_only,
            "--credit": credit,
            "--score": score,
            "--values": values,
            "--episode": episode,
        }
        of_plugins = {f"--{name.replace('_', '-')}": value for name, value in added.items()}
        return export(self, None if path is None else Path(path), format, options | of_plugins)

    def to_pandas(self) -> pandas.DataFrame:
        """A table of the episodes, one row each. Needs the package pandas.

        Raises:
            StoreError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError:
            raise StoreError("`to_pandas` needs pandas: pip install pandas") from None
        rows = [episode.row for episode in self.episodes]
        names = type(rows[0]).__struct_fields__ if rows else ()
        return pandas.DataFrame({name: [getattr(row, name) for row in rows] for name in names})

    def __repr__(self) -> str:
        part = "" if not self._expressions else f", where {' and '.join(self._expressions)}"
        return f"<Run {self.id}: {self.status}{part}>"

    def _repr_html_(self) -> str:
        """Its sums, its machine where a plugin draws SVG, and the turns of its first finished episodes."""
        from engine.machine.machine import resolved_machine
        from engine.plugin import loaded

        summary = self.summary
        outcomes = ", ".join(f"{name} {count}" for name, count in summary.outcomes.most_common())
        head = f"{self!r}: {summary.episodes} episodes, mean reward {summary.mean_reward:+.3f}; {outcomes}"
        draw = loaded("graph_formats").get("svg")
        try:
            machine = "" if draw is None else str(draw(resolved_machine(self.spec.spec), summary.transitions))
        except EngineError:  # it cannot be laid out, or needs a plugin that is gone
            machine = ""
        finished = [episode for episode in self.episodes if episode.row.status == "done"][:SHOWN_EPISODES]
        return f"<div><p>{_escaped(head)}</p>{machine}{_turns_table(finished, SHOWN_CHARACTERS)}</div>"


def _turns_table(episodes: Iterable[StoredEpisode], most: int | None = None) -> str:
    """The turns of episodes as a table of HTML, with at most so many characters of a reply."""
    rows = [["episode", "turn", "reply", "event", "rewards"]]
    for episode in episodes:
        replies = [message.text for message in episode.messages if message.role == "assistant"]
        replies = replies[len(replies) - len(episode.turns) :]  # examples in the prompt are no turns
        for turn, reply in zip(episode.turns, replies, strict=True):
            shown = reply if most is None or len(reply) <= most else f"{reply[:most]}…"
            rewards = ", ".join(f"{name} {value:+.3f}" for name, value in turn.rewards.items())
            rows.append([episode.id, str(turn.index), shown, turn.event, rewards])
    head, *body = (
        f"<tr>{''.join(f'<{tag}>{_escaped(cell)}</{tag}>' for cell in row)}</tr>"
        for tag, row in zip(chain(["th"], repeat("td")), rows, strict=False)
    )
    return f"<table><thead>{head}</thead><tbody>{''.join(body)}</tbody></table>"


def _escaped(text: str) -> str:
    """Nothing of a run is written into a page unescaped, because a model wrote it."""
    return escape(visible(mask(text)))


def open(run: str | Path, out: str | Path = "runs") -> Run:
    """Open a stored run for reading.

    Args:
        run: A folder, an id, the beginning of one, or `latest`.
        out: The folder in which runs are stored.

    Raises:
        StoreError: there is no such run.
    """
    return Run(RunStore.open(find_run(run, out=out), readonly=True))
