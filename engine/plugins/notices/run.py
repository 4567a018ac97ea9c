"""Notices of one run or evaluation: while it runs, when it fails as a whole, and when it is finished."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from engine.plugins.notices.notifier import Notifier
from engine.plugins.notices.spec import NotifySpec
from engine.plugins.notices.watch import Watch

if TYPE_CHECKING:
    from engine.runner.counters import RunCounters
    from engine.runner.summary import RunResult, RunSummary
    from engine.spec.load import LoadedSpec
    from engine.store.store import RunStore


class RunNotices:
    """Sends the notices that `notify` of the spec asks for. It is a `RunObserver`."""

    def __init__(self, loaded: LoadedSpec, store: RunStore) -> None:
        """
        Raises:
            NoticeError: a channel cannot work.
        """
        what = "evaluation" if store.header.evaluation else "run"
        self._spec = NotifySpec.or_default(loaded.spec)
        self._notifier = Notifier(self._spec, store.run_id, what, folder=store.folder, base=loaded.base)

    async def failed(self, error: Exception) -> None:
        """Send `failed`."""
        await self._notifier.notify("failed", reason=f"{type(error).__name__}: {error}")

    def watch(self, live: RunCounters, summary: RunSummary, busy: Callable[[], bool]) -> Watch:
        """The thread that sends `stalled` and `budget` while episodes run, by their counts.

        Args:
            live: Counters of the run.
            summary: Sums over its finished episodes.
            busy: Whether an episode runs. Without one nothing stalls: a service waits for its next request.
        """
        return Watch(
            self._notifier,
            self._spec,
            lambda: {**_counts(summary), "sampled_tokens": live.tokens},
            tokens=lambda: live.tokens,
            progress=lambda: (live.tokens, summary.episodes) if busy() else object(),
            waits_for="no reply and no finished episode",
        )

    async def ended(self, result: RunResult) -> None:
        """Send `finished`, or `failed` if the run failed as a whole."""
        counts = _counts(result.summary)
        if (stopped := result.stopped) is not None:
            kind = "budget" if stopped.kind == "budget_reached" else "failed"
            await self._notifier.notify(kind, reason=f"{type(stopped).__name__}: {stopped}", **counts)
        elif result.summary.backend_failed:
            blamed = result.summary.causes.blamed("backend")
            reason = f"the backend failed {blamed} of {result.summary.episodes} episodes"
            await self._notifier.notify("failed", reason=reason, **counts)
        elif result.faults:
            reason = f"{len(result.faults)} episodes could not be finished; the first: {result.faults[0]}"
            await self._notifier.notify("failed", reason=reason, **counts)
        elif result.summary.all_failed:
            await self._notifier.notify("failed", reason=result.summary.causes.words(result.summary.episodes), **counts)
        else:
            await self._notifier.notify("finished", reason=_sentence(result.summary), **counts)


def _counts(summary: RunSummary) -> dict[str, Any]:
    return {
        "episodes": summary.episodes,
        "solved": summary.solved,
        "failed_episodes": summary.causes.failures,
        "mean_reward": summary.mean_reward,
    }


def _sentence(summary: RunSummary) -> str:
    failed = f", {summary.causes.failures} failed" if summary.causes.failures else ""
    return f"{summary.episodes} episodes, {summary.solved} solved{failed}, mean reward {summary.mean_reward:.3f}"


def observe(loaded: LoadedSpec, store: RunStore) -> RunNotices:
    """The hook `observe_run`."""
    return RunNotices(loaded, store)
