"""How long `engine validate` takes: to start, for one spec, and for a hundred that all differ.

    python bench/validate.py

Prints seconds, best and median of several runs. Nothing is asserted: a busy machine is slower.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
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
environment: {{use: "engine.environments.arithmetic:Arithmetic"}}
tools: [{{use: "engine.environments.tools.calculator:calculate", timeout: 5s}}]
user: {{use: "engine.environments.arithmetic:Teacher"}}
machine:
  preset: tools_and_user
  transitions:
    - {{trigger: answered, source: GENERATING, dest: DONE, conditions: "turns.assistant > {turns} && tokens.sampled > {index}"}}
    - {{trigger: feedback, source: AWAITING_USER_FEEDBACK, dest: DONE, conditions: "facts.tries > {index}"}}
limits: {{assistant_turns: {limit}, user_turns: {users}, tool_calls: {calls}}}
rewards:
  reassign:
    - {{at: AWAITING_USER_FEEDBACK, when: "feedback.solved && turns.user > 1", turn: last, to: previous, share: 0.{share}}}
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


def seconds(run: Callable[[], object], times: int) -> tuple[float, float, float]:
    """Best and median on the clock, and the least of the processor, which a busy machine changes less."""
    taken, worked = [], []
    for _ in range(times):
        began, before = time.perf_counter(), _worked()
        run()
        taken.append(time.perf_counter() - began)
        worked.append(_worked() - before)
    return min(taken), statistics.median(taken), min(worked)


def _worked() -> float:
    """Seconds of the processor, of this process and those that it has waited for."""
    found = os.times()
    return found.user + found.system + found.children_user + found.children_system


def command(*arguments: str) -> Callable[[], object]:
    """`engine …` in a process of its own."""
    return lambda: subprocess.run(
        [sys.executable, "-m", "engine.cli.main", *arguments], cwd=ROOT, check=False, capture_output=True, timeout=120
    )


def hostile(folder: Path) -> dict[str, tuple[float, float, float]]:
    """The slowest of the specs that are made to be slow."""
    from engine.validate.examine import Options, examine

    sys.path.insert(0, str(ROOT / "tests" / "validate"))
    from hostile_specs import BUSY, REFUSED

    taken = {}
    for name, (text, _) in (BUSY | REFUSED).items():
        file = folder / "hostile.yaml"
        file.write_bytes(text.encode("utf-8", "surrogatepass"))
        taken[name] = seconds(lambda file=file: examine(file, Options(cost=True)), 1)
    worst = sorted(taken, key=lambda name: -taken[name][2])[:3]
    return {f"hostile: {name}": taken[name] for name in worst}


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
        from engine.validate import all_rules
        from engine.validate.examine import Options, examine, find_specs

        def hundred() -> None:
            with contextlib.redirect_stdout(io.StringIO()):
                for path in find_specs([folder]):
                    examine(path)

        all_rules()
        rows["100 specs after import, first time"] = seconds(hundred, 1)
        rows["100 specs with the worst case"] = seconds(
            lambda: [examine(path, Options(cost=True)) for path in find_specs([folder])], 1
        )
        rows |= hostile(folder)
    heavy = sorted({"torch", "transformers", "pyarrow", "renderers"} & set(sys.modules))
    for what, (best, median, worked) in rows.items():
        print(f"{what:<40} {best:7.3f} s best {median:7.3f} s median {worked:7.3f} s of processor")
    print(f"heavy modules imported: {', '.join(heavy) or 'none'}")


if __name__ == "__main__":
    main()
