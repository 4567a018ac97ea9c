"""Goldens: what the engine writes and says, held to committed files.

    python tests/goldens/golden_kit.py --check           compares everything, in two processes
    python tests/goldens/golden_kit.py --record-texts    writes the texts anew: in a commit of its own that lists what users see
    python tests/goldens/golden_kit.py --record NAME     writes a golden that is not there yet

Three sets. *Bytes* (`golden_bytes`): rows, journals and stored trajectories of episodes on the scripted backend, a training of four steps,
and what adapters hand over. *Texts* (`golden_texts`): help, messages of rules, JSON Schemas. *Old runs* (`old_runs`): stores that an
earlier revision wrote, and what was exported from them. CONTRIBUTING.md says when a set may be recorded anew.

A golden is a file of JSON lines, one record a line. A record's `at` says where it is from; its other keys are compared with order and
type. `normal` is the one place that removes what differs between two runs of the same.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import groupby, takewhile
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
if __name__ in ("__main__", "__mp_main__"):
    folders = (
        "goldens",
        "kit",
        "validate",
        "core/runner",
        "plugins/trainers",
        "core/backends",
        "plugins/sglang",
        "plugins/drivers",
    )
    sys.path[:0] = [str(ROOT), *(str(HERE.parent / folder) for folder in folders)]
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TQDM_DISABLE": "1"}
    os.environ.setdefault("OMP_NUM_THREADS", "1")

HELD = "it is held and must not be recorded anew (CONTRIBUTING.md, Goldens)"
HINTS = {
    "bytes": f"the change is at fault: {HELD}",
    "old": f"the change is at fault: {HELD}",
    "texts": "if users are to see this, record it in a commit of its own that lists it: python tests/goldens/golden_kit.py --record-texts",
}
"""What to do about a difference, by set."""
LONG = 300
"""Characters of a value that a message shows."""
Record = dict[str, Any]
TIMES = {"seconds", "queue_seconds", "created", "started", "ended", "time"}
"""Keys of values that tell time."""
RUNS = {"run_id", "run"}
"""Keys of ids of runs."""
PLACES = {"trace", "engine_version", "packages"}
"""Keys of values that tell of the machine and the version: tracebacks have paths and lines of source."""


class Golden(NamedTuple):
    """One golden."""

    set: str
    """`bytes`, `texts` or `old`."""
    name: str
    records: Callable[[Path], list[Record]]
    """Makes the records in an empty folder."""
    tolerance: float = 0.0
    """Of floats, relative to values above 1. Ten times as much of maxima over tokens and norms of gradients."""

    @property
    def file(self) -> Path:
        """The committed records."""
        return HERE / self.set / f"{self.name}.jsonl"


def goldens() -> dict[str, Golden]:
    """All goldens by name, the longest to make first."""
    import golden_bytes
    import golden_texts
    import old_runs

    every = [*golden_bytes.GOLDENS, *old_runs.GOLDENS, *golden_texts.GOLDENS]
    return {golden.name: golden for golden in every}


def normal(value: Any, folder: Path | None = None) -> Any:
    """A value without what differs between two runs of the same: times, ids of runs, tracebacks, versions, and the run's folder.

    Args:
        value: Plain data.
        folder: The folder in which the run was made; its path becomes `FOLDER`.
    """
    if isinstance(value, dict):
        return {
            key: (
                0.0 if key in TIMES and isinstance(inner, int | float)
                else dict.fromkeys(inner, 0.0) if key == "seconds" and isinstance(inner, dict)  # by state
                else "RUN" if key in RUNS and isinstance(inner, str)
                else "…" if key in PLACES and inner
                else normal(inner, folder)
            )
            for key, inner in value.items()
        }  # fmt: skip
    if isinstance(value, list | tuple):
        return [normal(inner, folder) for inner in value]
    if isinstance(value, str) and folder is not None:
        return value.replace(str(folder), "FOLDER")
    return value


def runs(values: Iterable[Any]) -> list[list[Any]]:
    """[[value, how many in a row], …]"""
    return [[value, len(list(group))] for value, group in groupby(values)]


def written(records: Iterable[Record]) -> str:
    """Records as lines."""
    return "".join(f"{json.dumps(record, ensure_ascii=False)}\n" for record in records)


def committed(golden: Golden) -> list[Record]:
    """The records that were written down."""
    return [json.loads(line) for line in golden.file.read_text(encoding="utf-8").splitlines()]


def differences(golden: Golden, records: list[Record]) -> Iterator[str]:
    """What is not as it was written down, the first difference of each record: golden, record, field, both values; then what to do."""
    if not golden.file.exists():
        yield f"{golden.file} is not there; write it: python tests/goldens/golden_kit.py --record {golden.name}"
        return
    now = {record["at"]: record for record in map(json.loads, written(records).splitlines())}
    before = {record["at"]: record for record in committed(golden)}
    lines = []
    for at in dict.fromkeys([*before, *now]):
        if at not in now:
            lines.append(f"{at}: is missing")
        elif at not in before:
            lines.append(f"{at}: was not there")
        elif (first := first_difference(before[at], now[at], golden.tolerance)) is not None:
            lines.append(f"{at}: {first}")
    if not lines and list(now) != list(before):
        lines.append("the order of the records has changed")
    yield from (f"{golden.set}/{golden.name}: {line}" for line in lines)
    if lines:
        yield HINTS[golden.set]


def first_difference(before: Any, now: Any, tolerance: float = 0.0, path: str = "") -> str | None:
    """The first place where two values differ, as `path: before, now after`; None where they are the same."""
    if isinstance(before, dict) and isinstance(now, dict):
        dot = f"{path}." if path else ""
        for key in dict.fromkeys([*before, *now]):
            if key not in now:
                return f"{dot}{key}: {shown(before[key])}, now missing"
            if key not in before:
                return f"{dot}{key}: was missing, now {shown(now[key])}"
        if list(before) != list(now):
            return f"{path or 'the record'}: the keys {list(before)}, now in the order {list(now)}"
        inner: Iterable[tuple[str, Any, Any]] = ((f"{dot}{key}", before[key], now[key]) for key in before)
    elif isinstance(before, list) and isinstance(now, list):
        inner = ((f"{path}[{at}]", one, other) for at, (one, other) in enumerate(zip(before, now, strict=False)))
    else:
        if same(before, now, tolerance * (10 if path.endswith(("_max", "grad_norm")) else 1)):
            return None
        if isinstance(before, str) and isinstance(now, str) and min(len(before), len(now)) > LONG:
            equal = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, now, strict=False)))
            start = max(0, equal - LONG // 4)
            return f"{path}, character {start}: {shown(before[start:])}, now {shown(now[start:])}"
        return f"{path}: {shown(before)}, now {shown(now)}"
    for place, one, other in inner:
        if (difference := first_difference(one, other, tolerance, place)) is not None:
            return difference
    return f"{path}: {len(before)} values, now {len(now)}" if len(before) != len(now) else None


def same(before: Any, now: Any, tolerance: float) -> bool:
    """Whether two values that hold no others are the same: 1, 1.0 and True are three values, and NaN is one."""
    if type(before) is not type(now):
        return False
    if isinstance(before, float) and tolerance and math.isfinite(before):
        return abs(before - now) <= tolerance * max(1.0, abs(before))
    return before == now or (before != before and now != now)


def shown(value: Any) -> str:
    """A value in a message."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= LONG else f"{text[:LONG]}…"


def check(name: str) -> tuple[str, list[str], float]:
    """Make a golden's records and compare them: its name, what differs, and how many seconds it took."""
    began = time.perf_counter()
    golden = goldens()[name]
    with tempfile.TemporaryDirectory(prefix="golden-") as folder:
        found = list(differences(golden, golden.records(Path(folder).resolve())))
    return name, found, time.perf_counter() - began


def check_all(names: list[str]) -> int:
    """Compare goldens in two processes, and print what differs; 1 if anything does."""
    began, faults = time.perf_counter(), 0
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        for name, found, seconds in pool.map(check, names):
            print(f"{'DIFFERS' if found else 'same':8}{name:24}{seconds:6.1f} s", *found, sep="\n    ")
            faults += bool(found)
    print(f"{len(names)} goldens, {faults} differ, {time.perf_counter() - began:.0f} s")
    return 1 if faults else 0


def record(names: Iterable[str]) -> None:
    """Write goldens that are not there yet, and texts anew; print what differs from the texts before."""
    for golden in (goldens()[name] for name in names):
        if golden.file.exists() and golden.set != "texts":
            raise SystemExit(f"{golden.file} is there already: {HELD}")
        with tempfile.TemporaryDirectory(prefix="golden-") as folder:
            records = golden.records(Path(folder).resolve())
        if golden.file.exists():
            print(*differences(golden, records), sep="\n")
        golden.file.parent.mkdir(exist_ok=True)
        golden.file.write_text(written(records), encoding="utf-8")
        print(f"wrote {golden.file.relative_to(ROOT)}: {len(records)} records, {golden.file.stat().st_size:,} bytes")


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    what = parser.add_mutually_exclusive_group(required=True)
    every = goldens()
    what.add_argument(
        "--check", nargs="*", metavar="NAME", help=f"compare these goldens, by default all: {', '.join(every)}"
    )
    what.add_argument("--record-texts", action="store_true", help="write the texts anew")
    what.add_argument("--record", nargs="+", metavar="NAME", help="write goldens that are not there yet")
    what.add_argument(
        "--record-old", nargs="+", metavar="NAME", help="write old runs that are not there yet, by this revision"
    )
    options = parser.parse_args()
    if unknown := [name for name in [*(options.check or []), *(options.record or [])] if name not in every]:
        parser.error(f"unknown goldens {unknown}; there are {', '.join(every)}")
    if options.check is not None:
        return check_all(options.check or list(every))
    if options.record_old:
        import old_runs

        old_runs.write(options.record_old)
    else:
        record(options.record or [name for name in every if every[name].set == "texts"])
    return 0


if __name__ == "__main__":
    import golden_kit

    sys.exit(golden_kit.main())
