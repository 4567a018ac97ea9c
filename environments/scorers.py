"""Scorers: what judges an episode when it is over. `rewards: {scorer: {use: math-verify}}`.

Invariant: only the policy's own replies are graded. An answer that takes too long to check is a wrong answer, not a
failure: whoever could stop the checking would otherwise choose not to be graded.
"""

from __future__ import annotations

import atexit
import json
import re
import select
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Literal

from schemas.environment import EpisodeView
from schemas.reward import RewardEvent

MOST_CHARACTERS = 20_000
"""Of a reply, from its end, that are read for an answer."""
_TAGS = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL | re.IGNORECASE)
_STARTING = 60.0
"""Seconds that a fresh checker has to be ready: it imports SymPy."""


class AnswerChecker:
    """Compares answers in processes of its own; one that does not answer in time is killed, and another takes its place.

    Args:
        most: Processes at once.
    """

    def __init__(self, most: int = 2) -> None:
        self._slots = threading.BoundedSemaphore(most)
        self._idle: list[subprocess.Popen[bytes]] = []
        self._lock = threading.Lock()
        atexit.register(self.close)

    def check(self, gold: str, reply: str, seconds: float = 5.0) -> dict[str, Any] | None:
        """What `environments.math_worker.check` says; None where it says nothing within `seconds`."""
        with self._slots:
            worker = self._take()
            told = _ask(worker, {"gold": gold, "reply": reply[-MOST_CHARACTERS:]}, seconds)
            if told is None:
                worker.kill()
                worker.wait()
            else:
                with self._lock:
                    self._idle.append(worker)
            return told

    def _take(self) -> subprocess.Popen[bytes]:
        """A process that is ready: its imports are not counted against an answer."""
        while True:
            with self._lock:
                worker = self._idle.pop() if self._idle else None
            if worker is None:
                break
            if worker.poll() is None:
                return worker
        script = str(Path(__file__).with_name("math_worker.py"))
        worker = subprocess.Popen(
            [sys.executable, "-P", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        if _ask(worker, {"gold": "1", "reply": "1"}, _STARTING) is None:
            worker.kill()
            worker.wait()
            raise RuntimeError("the process that checks answers did not start: is math-verify whole?")
        return worker

    def close(self) -> None:
        """End the processes that wait for work."""
        with self._lock:
            idle, self._idle = self._idle, []
        for worker in idle:
            worker.kill()
            worker.wait()


def _ask(worker: subprocess.Popen[bytes], question: dict[str, Any], seconds: float) -> dict[str, Any] | None:
    """One line out, one line in; None where none comes in time."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    try:
        worker.stdin.write(json.dumps(question).encode() + b"\n")
        worker.stdin.flush()
        ready, _, _ = select.select([worker.stdout], [], [], seconds)
        line = worker.stdout.readline() if ready else b""
    except BrokenPipeError:
        return None
    told = json.loads(line) if line else None
    return told if isinstance(told, dict) else None


CHECKER = AnswerChecker()
"""Shared by every episode; its processes start with the first answer."""


def check_answer(gold: str, reply: str, seconds: float = 5.0) -> tuple[bool, str]:
    """Whether `reply` gives the right answer last, and in words what was found.

    Raises:
        ValueError: the right answer itself cannot be read.
    """
    tagged = _TAGS.findall(reply)
    told = CHECKER.check(gold, tagged[-1] if tagged else reply, seconds)
    if told is None:
        return False, f"not checked within {seconds:g} s"
    if "problem" in told:
        raise ValueError(told["problem"])
    if told["answer"] is None:
        return False, f"not readable ({told['error']})" if "error" in told else "no answer found"
    return told["right"], f"{told['answer']} is {'right' if told['right'] else 'wrong'}"


def math_verify(
    view: EpisodeView,
    answer: str = "answer",
    name: str = "correct",
    value: float = 1.0,
    wrong: float = 0.0,
    turns: Literal["last", "each"] = "last",
    seconds: float = 5.0,
) -> list[RewardEvent]:
    r"""Reward the right mathematical answer: `\frac{1}{2}`, `0.5`, `\boxed{x=3}`, sets, intervals, …

    Args:
        view: The episode.
        answer: The task's field with the right answer; of a GSM8K solution, what follows `####` counts.
        name: Of the reward.
        value: For a right answer.
        wrong: For anything else; nothing is written where it is 0.
        turns: Whether the episode's last reply is graded, or each.
        seconds: Longest that checking one answer may take; past it, it is wrong.

    Raises:
        ValueError: the task has no such field, or it cannot be read.
    """
    if answer not in view.task.fields:
        raise ValueError(f"task {view.task.id!r} has no field {answer!r}; name another with `with: {{answer: …}}`")
    gold = str(view.task.fields[answer])
    graded = list(enumerate(view.replies))
    rewards: list[RewardEvent] = []
    for turn, reply in graded if turns == "each" else graded[-1:]:
        right, found = check_answer(gold, reply, seconds)
        if right or wrong:
            rewards.append(RewardEvent(turn=turn, name=name, value=value if right else wrong, cause=found))
    return rewards
