"""Goldens: whole multi-turn rows as literal ids, by real tokenizers and chat templates.

A golden is a spec on the scripted backend (`specs/NAME.yaml`) and the rows that it must give (`rows/NAME.json`). The
tokenizers ship with the tests, so nothing here is skipped. A change of a template, a library or the engine that
changes one id fails a test. To accept a change, read the difference, then write the rows anew:

    python tests/goldens/golden_kit.py
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import yaml

HERE = Path(__file__).parent
if __name__ == "__main__":
    sys.path[:0] = [str(HERE.parent / "kit"), str(HERE.parents[1])]
NAMES = sorted(path.stem for path in (HERE / "specs").glob("*.yaml"))


def written_spec(name: str, folder: Path) -> Path:
    """The golden's spec, its model's name replaced by the tokenizer's folder."""
    spec = yaml.safe_load((HERE / "specs" / f"{name}.yaml").read_text(encoding="utf-8"))
    from shipped_tokenizers import unpack

    spec["model"]["path"] = str(unpack(spec["model"]["path"], folder / "tokenizers"))
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(spec, sort_keys=False), encoding="utf-8")
    return path


async def rows_of(name: str, folder: Path) -> list[dict[str, Any]]:
    """Run the golden's spec; its rows as they are written down in `rows/`."""
    from engine.backends.registry import open_backend
    from engine.runner.run import Runner
    from engine.spec.load import load_spec
    from engine.spec.tasks import load_tasks
    from engine.store import RunHeader, RunStore
    from engine.store.export import export_rows
    from engine.tokens.loading import load_format

    loaded = load_spec(written_spec(name, folder))
    form = load_format(loaded.spec.model, loaded.base)
    backend = open_backend(loaded, form)
    await backend.start()
    store = RunStore.create(folder / "runs" / name, RunHeader.of(loaded))
    try:
        await Runner(loaded, load_tasks(loaded), form, backend, store).run()
        reasons = {
            (episode.episode_id, branch.index): branch.reason
            for episode in store.trajectories()
            for branch in episode.branches
        }
        return [_shown(row, reasons[row["episode_id"], row["branch"]], form) for row in export_rows(store)]
    finally:
        await backend.close()
        store.close()


def _shown(row: dict[str, Any], reason: str, form: Any) -> dict[str, Any]:
    ids = np.asarray(row["input_ids"]).tolist()
    mask = np.asarray(row["loss_mask"]).tolist()
    turns = np.asarray(row["turn_ids"]).tolist()
    logprobs = np.asarray(row["logprobs"]).tolist()
    return {
        "episode": row["episode_id"],
        "branch": row["branch"],
        "reason": reason,
        "trainable": row["trainable"],
        "text": form.decode(ids),
        "input_ids": ids,
        "loss_mask": runs(mask),
        "turn_ids": runs(turns),
        "logprobs": runs([round(value, 6) for value in logprobs]),
        "images": [[image["start"], image["end"]] for image in row["images"]],
    }


def runs(values: list[Any]) -> list[list[Any]]:
    """[[value, how many in a row], …]"""
    return [[value, len(list(group))] for value, group in groupby(values)]


def kept(name: str) -> list[dict[str, Any]]:
    """The rows that were written down."""
    found: list[dict[str, Any]] = json.loads((HERE / "rows" / f"{name}.json").read_text(encoding="utf-8"))
    return found


def main() -> None:
    """Write all rows anew."""
    with tempfile.TemporaryDirectory() as folder:
        for name in NAMES:
            rows = asyncio.run(rows_of(name, Path(folder)))
            text = ",\n".join(
                " {"
                + ",\n  ".join(
                    f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in row.items()
                )
                + "}"
                for row in rows
            )
            (HERE / "rows" / f"{name}.json").write_text(f"[\n{text}\n]\n", encoding="utf-8")
            print(name, [len(row["input_ids"]) for row in rows])


if __name__ == "__main__":
    main()
