"""Checks answers in a process of its own, which can be killed: run as a script, one JSON object a line in and out.

In: `{"gold": …, "reply": …}`. Out: `{"answer": …, "right": …}`, or `{"problem": …}` where the right answer cannot be
read. SymPy may work on an answer such as `9^{9^{9^9}}` for ever inside one call that nothing interrupts, so whoever
asks keeps the time (`environments.scorers`).
"""

from __future__ import annotations

import json
import sys
from typing import Any


def check(gold: str, reply: str) -> dict[str, Any]:
    """Whether the answer that `reply` gives last is `gold`: read and compared by math-verify."""
    from math_verify import parse, verify

    right = _read(gold, parse)
    if not right:
        return {"problem": f"{gold!r} cannot be read as mathematics"}
    # no timeouts of its own: they are signals, and cannot interrupt what is slow
    answer = parse(reply, parsing_timeout=None)
    if not answer:
        return {"answer": None, "right": False}
    return {"answer": str(answer[-1]), "right": bool(verify(right, answer, timeout_seconds=None))}


def _read(gold: str, parse: Any) -> list[Any]:
    """The right answer: behind `####` where there is such a mark, as LaTeX, or as it stands."""
    text = gold.rsplit("####", 1)[-1].strip()
    return list(parse(f"${text}$", parsing_timeout=None) or parse(text, parsing_timeout=None))


def main() -> None:
    """Answer until nobody asks any more."""
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            told = check(asked["gold"], asked["reply"])
        except Exception as error:  # noqa: BLE001  (whatever the libraries raise on what a model wrote)
            told = {"answer": None, "right": False, "error": f"{type(error).__name__}: {error}"}
        sys.stdout.write(json.dumps(told) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
