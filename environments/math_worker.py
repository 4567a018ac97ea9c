"""Reads and compares mathematical answers in a process of its own; each request and reply is one line of JSON.

    {"task": "compare", "seconds": 2, "gold": …, "reply": …}    ->  {"answer": …, "right": …}, or {"problem": …}
    {"task": "read", "seconds": 2, "latex": …}                  ->  {"value": …}
    {"task": "same", "seconds": 2, "gold": …, "answer": …}      ->  {"right": …}

Invariant: a request takes at most `seconds` of CPU time, also on a busy machine. After that the reply is `{"late":
true}`, or the kernel ends the process (SIGXCPU) if a call of SymPy cannot be interrupted. Memory is limited too.
`engine.environments.math_answers` starts these processes.
"""

from __future__ import annotations

import json
import logging
import math
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any

MAX_MEMORY = 4 * 2**30
"""Maximum address space in bytes, many times what SymPy needs."""


class MathTimeout(BaseException):
    """The request has used up its CPU time. Not an `Exception`, because the libraries catch those and continue."""


def compare(gold: str, reply: str) -> dict[str, Any]:
    """Whether the last answer in `reply` equals `gold`; math-verify reads and compares both."""
    from math_verify import parse, verify

    text = gold.rsplit("####", 1)[-1].strip()  # GSM8K's solutions end so
    # Without the library's own time limits: they count wall time and cannot interrupt slow code in C.
    right = list(parse(f"${text}$", parsing_timeout=None) or parse(text, parsing_timeout=None))
    if not right:
        return {"problem": f"{gold!r} cannot be read as mathematics"}
    answer = parse(reply, parsing_timeout=None)
    if not answer:
        return {"answer": None, "right": False}
    return {"answer": str(answer[-1]), "right": bool(verify(right, answer, timeout_seconds=None))}


def read(latex: str) -> dict[str, Any]:
    """The value of a LaTeX expression; `value` is None if it is not a finite real number."""
    expression = _expression(latex)
    if expression is None or not getattr(expression, "is_number", False):
        return {"value": None}
    try:
        value = complex(expression.evalf(30))
    except (TypeError, ValueError, ArithmeticError):
        return {"value": None}  # a set, a relation, infinity
    real = abs(value.imag) <= 1e-12 and math.isfinite(value.real) and abs(value.real) <= 1e15
    return {"value": value.real if real else None}


def same(gold: str, answer: str) -> dict[str, Any]:
    """Whether two numbers in LaTeX are equal: exactly, or as decimals to six places."""
    from math_verify import verify

    return {"right": bool(verify(_expression(gold), _expression(answer), float_rounding=6, timeout_seconds=None))}


def _expression(latex: str) -> Any:
    """The SymPy expression that math-verify reads; None if it reads none or several."""
    from math_verify import LatexExtractionConfig, parse

    expressions = parse(
        f"\\boxed{{{latex}}}",
        extraction_config=[LatexExtractionConfig()],
        fallback_mode="no_extraction",
        parsing_timeout=None,
    )
    return expressions[0] if len(expressions) == 1 else None


_TASKS: dict[str, Callable[..., dict[str, Any]]] = {"compare": compare, "read": read, "same": same}


def _strike(*_: object) -> None:
    raise MathTimeout


def _within(seconds: float, task: Callable[..., dict[str, Any]], arguments: dict[str, Any]) -> dict[str, Any]:
    used = resource.getrusage(resource.RUSAGE_SELF)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime + 2 * seconds) + 1, hard))
    try:
        signal.setitimer(signal.ITIMER_PROF, seconds, 0.1)  # repeated, because a bare `except` may catch the first one
        try:
            return task(**arguments)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    except MathTimeout:
        return {"late": True}
    except MemoryError:
        return {"answer": None, "value": None, "right": False, "error": "it needs too much memory"}
    except Exception as error:  # noqa: BLE001  (the libraries can raise anything on a text of a model)
        return {"answer": None, "value": None, "right": False, "error": f"{type(error).__name__}: {error}"}


def main() -> None:
    """Answer requests until standard input is closed."""
    signal.signal(signal.SIGPROF, _strike)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles Ctrl-C
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    logging.disable()
    for line in sys.stdin:
        asked = json.loads(line)
        task, seconds = _TASKS[asked.pop("task")], asked.pop("seconds")
        sys.stdout.write(json.dumps(_within(seconds, task, asked)) + "\n")
        sys.stdout.flush()
