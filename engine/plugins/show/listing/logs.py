"""Reads the logs of a training (`metrics.jsonl`, `batches.jsonl`), which may be written at the same time.

`MetricsLog` and `BatchLog` remove an incomplete last line, because they write; these functions ignore it and change nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def lines_of(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the complete lines of a file of JSON objects; none if there is no such file."""
    try:
        data = file.read_bytes()
    except OSError:
        return
    for line in data.splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            yield value


def sampled_tasks(batches: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield for each step of `batches.jsonl` the ids of the tasks that it sampled, whether it trained on them or not."""
    for record in lines_of(batches):
        if record.get("step_made", True):
            yield record["step"], [record["tasks"][str(group)] for group in (*record["used"], *record["left_out"])]
