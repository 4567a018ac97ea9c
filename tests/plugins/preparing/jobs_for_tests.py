"""Functions that the tests of `engine.plugins.preparing` call in worker processes, and programs that they start."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from engine.plugins.preparing.jobs import PreparedCache, digest_of_parts, prepare

REMOTE = "jobs_for_tests:work"


def work(common: dict[str, Any], value: dict[str, Any]) -> dict[str, Any]:
    """Squares; what `value` asks for happens in workers alone."""
    print("printed by the job")
    if os.getpid() != common["parent"]:
        if value.get("in_worker") == "dies":
            os._exit(3)
        if value.get("in_worker") == "raises":
            raise RuntimeError("only in workers")
    if "log" in common:
        with Path(common["log"]).open("a") as file:
            file.write(f"{os.getpid()} {value['number']}\n")
    time.sleep(common.get("seconds", 0.0))
    if value["number"] < 0:
        raise ValueError(f"{value['number']} has no place here")
    return {"square": value["number"] ** 2}


def run(folder: Path, values: list[dict[str, Any]], processes: int, **common: Any) -> list[dict[str, Any]]:
    """All results of `work`. Workers start at once."""
    common["parent"] = os.getpid()
    return list(
        prepare(
            [(digest_of_parts("squares", str(value["number"])), value) for value in values],
            local=lambda value: work(common, value),
            remote=REMOTE,
            common=common,
            cache=PreparedCache(folder),
            processes=processes,
            alone=0.0,
        )
    )


if __name__ == "__main__":  # folder, log, number of jobs, processes, seconds of a job
    given = sys.argv[1:]
    results = run(
        Path(given[0]),
        [{"number": number} for number in range(int(given[2]))],
        int(given[3]),
        log=given[1],
        seconds=float(given[4]),
    )
    print(sum(result["square"] for result in results), file=sys.stderr)
