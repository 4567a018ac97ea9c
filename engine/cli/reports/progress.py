"""What the panels of `run`, `eval` and `train` say about running episodes."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.runner.stats import RunCounters

_CAUSES = 3
"""Maximum number of causes and limits on a line."""
_FIRST, _OFTEN, _SELDOM = 2.0, 5.0, 30.0
_OFTEN_UNTIL = 60.0


def duration(seconds: float) -> str:
    """A duration with its two largest units: `45 s`, `3 min 20 s`, `2 h 5 min`, `4 d 3 h`."""
    whole = max(0, round(seconds))
    for unit, size, lower, part in (("d", 86_400, "h", 3_600), ("h", 3_600, "min", 60), ("min", 60, "s", 1)):
        if whole >= size:
            rest = whole % size // part
            return f"{whole // size} {unit}" + (f" {rest} {lower}" if rest else "")
    return f"{whole} s"


def speed(live: RunCounters) -> str:
    """Turns so far, turns and tokens a second."""
    return f"{live.turns} turns · {live.turns_per_second:.1f} turns/s · {live.tokens_per_second:.0f} tokens/s"


def running(live: RunCounters) -> list[tuple[str, int]]:
    """The number of running episodes by state."""
    return [(state, count) for state, count in dict(live.states).items() if count > 0]


def endings(live: RunCounters) -> list[str]:
    """Failures by cause, and the share of finished episodes that each limit ended; empty if there are none."""
    # Copies: a thread may call this while the run counts.
    failures, limits = Counter(dict(live.failures)), Counter(dict(live.limits))
    parts = []
    if failures:
        counted = [f"{cause} {count}" for cause, count in failures.most_common()]
        parts.append(f"{failures.total()} failed: {_listed(counted)}")
    if limits:
        shares = [f"{limit} {100 * count / max(live.finished, 1):.0f}%" for limit, count in limits.most_common()]
        parts.append(f"ended by limits: {_listed(shares)}")
    return parts


def _listed(parts: list[str]) -> str:
    return ", ".join([*parts[:_CAUSES], *(["…"] if len(parts) > _CAUSES else [])])


def pauses() -> Iterator[float]:
    """Yield the seconds to wait before each line of progress in a log: the first soon, many in the first minute, then few."""
    yield _FIRST
    waited = _FIRST
    while True:
        pause = _OFTEN if waited < _OFTEN_UNTIL else _SELDOM
        waited += pause
        yield pause


@contextmanager
def ticking(line: Callable[[], str | None], say: Callable[[str], None]) -> Iterator[None]:
    """Say a line of progress from time to time, in a thread, also while other code computes. `line` may return None: nothing to say."""
    stop = threading.Event()

    def work() -> None:
        for pause in pauses():
            if stop.wait(pause):
                return
            if (told := line()) is not None:
                say(told)

    thread = threading.Thread(target=work, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(timeout=1.0)
