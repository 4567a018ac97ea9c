"""Reads a number from an answer in any common notation, and compares numbers with math-verify.

Invariant: only one finite real number is an answer. A list, an interval, an equation between numbers or two candidates
side by side are not an answer, so a policy earns nothing by naming several. A text is checked before it is parsed
(length, allowed signs, powers, brackets; in linear time), and parsed in a process of its own (`MathPool`). Its limit
counts CPU time, so a correct answer is not marked wrong because the machine is busy. A request that takes too long, or
ends its process, has no result.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import select
import signal
import subprocess
from functools import lru_cache
from pathlib import Path
from queue import LifoQueue
from typing import Any, NamedTuple

from engine.processes.worker import start_python

SECONDS = 2.0
"""Default limit of CPU time per request. Ordinary answers take some hundredths of a second."""
_SILENCE = 600.0
"""Wall seconds after which a process that uses no CPU time and sends nothing is killed."""


class MathPool:
    """Processes that answer questions of `engine.environments.math_worker`; they start when needed. No `WorkerPool`: a
    limit counts CPU time.

    Args:
        most: Maximum number of processes. None: one per CPU core, at least 2.
    """

    def __init__(self, most: int | None = None) -> None:
        self._workers: LifoQueue[subprocess.Popen[bytes] | None] = LifoQueue()
        """Idle processes, the newest first; None for one that may be started."""
        for _ in range(most or max(2, os.cpu_count() or 2)):
            self._workers.put(None)
        atexit.register(self.close)

    def ask(self, task: str, seconds: float = SECONDS, **arguments: Any) -> dict[str, Any] | None:
        """Send one request; see `engine.environments.math_worker` for tasks and answers.

        Args:
            task: `compare`, `read` or `same`.
            seconds: CPU time that it may take. Waiting for a free process does not count.
            arguments: The arguments of the task.

        Returns:
            The reply; None if it took too long.

        Raises:
            RuntimeError: a process does not start, or sends nothing and uses no CPU time.
        """
        question = {"task": task, "seconds": seconds, **arguments}
        worker = self._workers.get()
        try:
            for attempt in range(2):
                if worker is None or worker.poll() is not None:
                    worker = _started()
                reply = _ask(worker, question)
                if reply is not None:
                    return None if reply.get("late") else reply
                if worker.wait() == -signal.SIGXCPU or attempt:
                    break  # it took too long or has ended two processes, so the answer is the cause
            return None
        finally:
            self._workers.put(worker)

    def close(self) -> None:
        """End the idle processes."""
        for worker in [self._workers.get() for _ in range(self._workers.qsize())]:
            self._workers.put(None)
            if worker is not None:
                worker.kill()
                worker.wait()


def _started() -> subprocess.Popen[bytes]:
    """A process that has finished its imports, so that they do not count as CPU time of a request."""
    worker = start_python("from engine.environments.math_worker import main; main()")
    if _ask(worker, {"task": "compare", "seconds": 120, "gold": "1", "reply": "1"}) is None:
        worker.wait()
        raise RuntimeError("the process that checks answers did not start; reinstall math-verify")
    return worker


def _ask(worker: subprocess.Popen[bytes], question: dict[str, Any]) -> dict[str, Any] | None:
    """Send one line and read one line; None if the process ended instead."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    try:
        worker.stdin.write(json.dumps(question).encode() + b"\n")
        worker.stdin.flush()
    except BrokenPipeError:
        return None
    used = _cpu_ticks(worker.pid)
    while not select.select([worker.stdout], [], [], _SILENCE)[0]:
        now = _cpu_ticks(worker.pid)
        if now == used:
            worker.kill()
            raise RuntimeError(f"the process that checks answers sent nothing for {_SILENCE:g} s and used no CPU time")
        used = now
    line = worker.stdout.readline()
    reply = json.loads(line) if line.endswith(b"\n") else None
    return reply if isinstance(reply, dict) else None


def _cpu_ticks(pid: int) -> int:
    """CPU time of a process, in ticks of the kernel's clock; -1 if it has ended or the system has no /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return -1
    return int(fields[11]) + int(fields[12])


POOL = MathPool()
"""Shared by every episode of this process."""


LONGEST = 120
"""Maximum number of characters of an answer."""
DEEPEST = 5
"""Maximum depth of nested brackets."""
MAX_VALUE = 1e15
"""Maximum absolute value of an answer."""
MAX_POWERS = 3
"""Maximum number of powers in one answer. Each exponent has one digit, so a value has at most a few thousand digits."""

TAGS = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL | re.IGNORECASE)
_BOXED = re.compile(r"\\boxed\s*\{")
_SPACES = re.compile(r"\\[,;:! ]|\\q?quad|~|\s+")
_WORDED = re.compile(r"\\(?:text|mathrm|mbox|textbf|mathbf|rm)\s*\{([^{}]*)\}")
_DEGREES = re.compile(r"\^\s*\{?\s*\\circ\s*\}?|\^\s*\\degree|\\degree|\\circ|°")
_UNITS = re.compile(
    r"\s*(?:(?:square|sq\.?|cubic)\s*)?\b(?:units?|degrees?|deg|mm|cm|km|m|millimeters?|centimeters?|meters?"
    r"|kilometers?|in|inch(?:es)?|ft|feet|foot|yd|yards?|mi|miles?)\b\.?(?:\s*\^\s*\{?[23]\}?)?\s*\Z",
    re.IGNORECASE,
)
_PLAIN = {"−": "-", "π": r"\pi ", "√": r"\sqrt ", "×": r"\times ", "·": r"\cdot ", "÷": "/", "≈": r"\approx "}
_ROOT = re.compile(r"(?<![\\a-z])sqrt\s*\(([^()]*)\)")
_WORD_PI = re.compile(r"(?<![\\a-z])pi(?![a-z])")
_BARE_ROOT = re.compile(r"\\sqrt\s*(\d)(?!\d)")
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
_SIDE_BY_SIDE = re.compile(r"[\d.]\s+[\d.]|\.\d*\.")
_POWER = re.compile(
    r"\^\s*(?:-?\d(?![\d.])|\{\s*-?\d\s*\}|\{\s*-?\d/\d\s*\}|\{\s*\\[dt]?frac\s*\{\s*\d\s*\}\s*\{\s*\d\s*\}\s*\})"
)
_DECIMAL = re.compile(r"-?(?:\d+\.?\d*|\.\d+)")
_ALLOWED = re.compile(r"(?:[\d\s.+\-*/(){}\[\]^]|\\(?:[dt]?frac|sqrt|pi|cdot|times|div|left|right)(?![a-z]))*")


class Number(NamedTuple):
    """A number that was read from an answer."""

    value: float
    latex: str
    """The exact value as LaTeX."""
    text: str
    """As it was written."""


def final_answer(reply: str) -> str | None:
    r"""The answer in a reply: the content of its last closed `\boxed{…}` or `<answer>…</answer>`; None without one."""
    answers = [(match.start(), match[1]) for match in TAGS.finditer(reply)]
    for match in _BOXED.finditer(reply):
        inside = _braced(reply, match.end())
        if inside is not None:
            answers.append((match.start(), inside))  # a box inside tags starts later than the tags, so the box is used
    return max(answers)[1].strip() if answers else None


def _braced(text: str, at: int) -> str | None:
    """The text from `at`, just after an opening brace, to the matching brace; None if there is no matching brace."""
    depth = 1
    for index in range(at, min(len(text), at + LONGEST + 1)):
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if depth == 0:
            return text[at:index]
    return None


@lru_cache(maxsize=8192)
def read_number(text: str) -> Number | None:
    r"""The value of an answer: `12`, `x = 5`, `\frac{8}{15}`, `2\sqrt{221}`, `53^\circ`, `1,200 cm`.

    In `x = 14.72 \approx 15`, the part after the last sign counts. Units and degree signs are ignored."""
    latex = _tidy(text)
    if latex is None:
        return None
    value = float(latex) if _DECIMAL.fullmatch(latex) else (POOL.ask("read", latex=latex) or {"value": None})["value"]
    if value is None or abs(value) > MAX_VALUE:
        return None
    return Number(value, latex, text.strip())


def same_number(answer: Number, gold: Number, tolerance: float = 0.0) -> bool:
    """Whether an answer is right.

    Args:
        answer: The given answer.
        gold: The right answer.
        tolerance: Maximum relative error: 0.01 accepts an error of 1 %, for answers that were rounded to two decimals.
            With 0, math-verify compares the numbers to six decimals.
    """
    off = abs(answer.value - gold.value)
    if tolerance > 0:
        return off <= tolerance * abs(gold.value) + 1e-9
    if off > 1e-5 * max(1.0, abs(gold.value)):
        return False
    reply = POOL.ask("same", gold=gold.latex, answer=answer.latex)
    return reply is not None and bool(reply["right"])


def _tidy(text: str) -> str | None:
    """An answer as LaTeX that is safe to parse; None if it is too long or contains more than one number."""
    if len(text) > LONGEST:
        return None
    for sign, latex in _PLAIN.items():
        text = text.replace(sign, latex)
    text = (
        text.strip()
        .replace("\\$", "$")
        .strip("$")
        .removeprefix("\\(")
        .removesuffix("\\)")
        .replace("\\!", "")
        .replace("{,}", ",")
    )
    text = re.split(r"\\approx|=", text)[-1]
    text = _SPACES.sub(" ", _DEGREES.sub(" ", _WORDED.sub(r" \1", text))).strip().rstrip(".")
    text = _UNITS.sub("", text)
    text = _WORD_PI.sub(r"\\pi ", _ROOT.sub(r"\\sqrt{\1}", text))
    text = _BARE_ROOT.sub(r"\\sqrt{\1}", text)
    text = _THOUSANDS.sub(lambda match: match[0].replace(",", ""), text).strip()
    if not re.search(r"\d|\\pi", text) or _SIDE_BY_SIDE.search(text) or not _ALLOWED.fullmatch(text):
        return None
    if text.count("^") != len(_POWER.findall(text)) or text.count("^") > MAX_POWERS or "**" in text:
        return None
    return _unnested(text)


def _unnested(text: str) -> str | None:
    """A text without double brackets of the same kind; None if brackets do not match or are nested too deeply.

    The parser's time doubles with each level. Linear in the text's length.
    """
    text = "{" + text + "}"  # so that braces around the whole text are double brackets too
    partner: dict[int, int] = {}
    opened: list[int] = []
    for at, sign in enumerate(text):
        if sign in "{([":
            opened.append(at)
        elif sign in "})]":
            if not opened or text[opened[-1]] + sign not in ("{}", "()", "[]"):
                return None
            partner[opened.pop()] = at
    if partner.get(0) != len(text) - 1:
        return None
    dropped = set()
    for start, end in partner.items():
        if text[start] in "{(" and text[start + 1] == text[start] and partner[start + 1] == end - 1:
            dropped |= {start, end}
    unnested = "".join(sign for at, sign in enumerate(text) if at not in dropped)[1:-1]
    depth = deepest = 0
    for sign in unnested:
        depth += (sign in "{([") - (sign in "})]")
        deepest = max(deepest, depth)
    return unnested if deepest <= DEEPEST else None
