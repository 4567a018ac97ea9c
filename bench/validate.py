"""How long `engine validate` takes: to start, for one spec, and for a hundred that all differ.

    python bench/validate.py

Prints seconds, best and median of several runs. Nothing is asserted: a busy machine is slower.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
SPEC = """\
spec: episode/v1
name: demo{index}
model: {{path: m}}
tasks: {{source: inline, rows: [{{question: "What is {index} + 2?"}}]}}
prompt: [{{role: user, content: "{{{{question}}}}"}}]
environment: {{use: "environments.arithmetic:Arithmetic"}}
tools: [{{use: "environments.tools.calculator:calculate", timeout: 5s}}]
user: {{use: "environments.arithmetic:Teacher"}}
machine:
  preset: tools_and_user
  transitions:
    - {{trigger: answered, source: GENERATING, dest: DONE, conditions: "turns.assistant > {turns} && tokens.sampled > {index}"}}
    - {{trigger: feedback, source: AWAITING_USER_FEEDBACK, dest: DONE, conditions: "facts.tries > {index}"}}
limits: {{assistant_turns: {limit}, user_turns: {users}, tool_calls: {calls}}}
rewards:
  reassign:
    - {{at: AWAITING_USER_FEEDBACK, when: "feedback.solved && turns.user > 1", from: last, to: previous, share: 0.{share}}}
"""


def write(folder: Path, count: int) -> None:
    """Specs of which no two have the same machine, guards and limits."""
    for index in range(count):
        text = SPEC.format(
            index=index,
            turns=index % 5,
            limit=6 + index % 7,
            users=2 + index % 6,
            calls=4 + index % 11,
            share=1 + index % 8,
        )
        (folder / f"spec{index:03}.yaml").write_text(text, encoding="utf-8")


def seconds(run: Callable[[], object], times: int) -> tuple[float, float]:
    """Best and median."""
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        run()
        taken.append(time.perf_counter() - began)
    return min(taken), statistics.median(taken)


def command(*arguments: str) -> Callable[[], object]:
    """`engine …` in a process of its own."""
    return lambda: subprocess.run(
        [sys.executable, "-m", "engine.cli.main", *arguments], cwd=ROOT, check=False, capture_output=True, timeout=120
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=7)
    times = parser.parse_args().times
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, 100)
        one = str(folder / "spec000.yaml")
        rows = {
            "python -c pass": seconds(lambda: subprocess.run([sys.executable, "-c", "pass"], check=True), times),
            "engine --help": seconds(command("--help"), times),
            "engine validate, one spec": seconds(command("validate", one), times),
            "engine validate specs/quickstart.yaml": seconds(command("validate", "specs/quickstart.yaml"), times),
            "engine validate, 100 specs": seconds(command("validate", str(folder)), min(times, 3)),
        }
        from engine.cli.validate import examine, find_specs

        def hundred() -> None:
            with contextlib.redirect_stdout(io.StringIO()):
                for path in find_specs([folder]):
                    examine(path)

        began = time.perf_counter()
        hundred()
        first = time.perf_counter() - began
        rows["100 specs after import, first time"] = (first, first)
        rows["100 specs with the worst case"] = seconds(
            lambda: [examine(path, cost=True) for path in find_specs([folder])], 1
        )
        heavy = sorted({"torch", "transformers", "pyarrow", "renderers"} & set(sys.modules))
    for what, (best, median) in rows.items():
        print(f"{what:<40} {best:7.3f} s best {median:7.3f} s median")
    print(f"heavy modules imported: {', '.join(heavy) or 'none'}")


if __name__ == "__main__":
    main()
