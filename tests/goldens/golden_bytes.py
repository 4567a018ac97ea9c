"""The goldens of bytes: rows, journals and trajectories of episodes, a training of four steps, and what adapters hand over."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import yaml
from golden_kit import HERE, ROOT, Golden, Record, normal, runs

TESTS = HERE.parent
OTHERS = ("training", "adapters", "adapters-images")
"""Goldens of a spec that are not all that its run has stored."""
EPISODES = sorted(path.stem for path in (HERE / "specs").glob("*.yaml") if path.stem not in OTHERS)
KILLED_AFTER = {"resumed": 4}
"""Commits after which a run is killed, by the name of its golden."""
UNSTEADY = re.compile("time/|memory/|sampler/diff|.*(seconds|_per_second)$")
"""Names of a training's metrics that depend on the machine, or are rounding alone."""
NUMBER = re.compile(r"\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")
IDS = {
    "completion_ids", "input_ids", "position_ids", "prompt", "prompt_ids", "prompt_token_ids", "prompts", "response_ids", "responses", "sums",
    "tokens",
}  # fmt: skip
"""Columns whose neighbouring values are seldom equal."""


def written_spec(name: str, folder: Path) -> Path:
    """The golden's spec, its model's name replaced by the tokenizer's folder."""
    from golden_code import save_model
    from shipped_tokenizers import unpack

    spec = yaml.safe_load((HERE / "specs" / f"{name}.yaml").read_text(encoding="utf-8"))
    model = unpack(spec["model"]["path"], folder / "tokenizers")
    if spec["backend"]["kind"] == "local":
        model = save_model(model, folder / "model")
    spec["model"]["path"] = str(model)
    if isinstance(
        script := spec["backend"].get("replies"), dict
    ):  # by task and sample: the engine takes these in a file
        (folder / f"{name}.script.yaml").write_text(yaml.safe_dump(script, sort_keys=False), encoding="utf-8")
        spec["backend"]["replies"] = f"{name}.script.yaml"
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(spec, sort_keys=False), encoding="utf-8")
    return path


def episodes(name: str, folder: Path) -> list[Record]:
    """All that a run has stored, and its rows; the run is killed and resumed where `KILLED_AFTER` says so."""
    from stopping import Resumed

    from engine.store import list_runs

    spec, out = written_spec(name, folder), folder / "runs"
    if name in KILLED_AFTER:
        kill_after(spec, out, KILLED_AFTER[name])
    resumed = Resumed(spec)
    asyncio.run(resumed.run(out))
    (run,) = list_runs(out)
    return [*rows_of(run, resumed.template.decode, folder), *stored(run, folder)]


def kill_after(spec: Path, out: Path, commit: int) -> None:
    """Run a spec in a process that is killed right after a commit of its store."""
    paths = [ROOT, TESTS / "core" / "runner", HERE]
    killed = subprocess.run(
        [sys.executable, TESTS / "core" / "runner" / "stopping.py", spec],
        input=f"{out} {commit}\n",
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))},
        capture_output=True,
        text=True,
        check=True,
    )
    if killed.stdout.strip() != "9":
        raise AssertionError(f"{spec} ended before its process was killed: {killed.stdout}{killed.stderr}")


def rows_of(run: Path, decode: Callable[[list[int]], str], folder: Path) -> list[Record]:
    """The rows of a run, with the text of their ids."""
    from engine.store import RunStore
    from engine.store.rows.export import export_rows

    with RunStore.open(run, readonly=True) as store:
        return [
            {"at": f"row {row['episode_id']} branch {row['branch']}"}
            | normal({name: plain(name, value) for name, value in row.items()}, folder)
            | {"text": decode(row["input_ids"].tolist())}
            for row in export_rows(store)
        ]


def plain(name: str, value: Any) -> Any:
    """A column as JSON: ids as they are, other values by tokens as runs of equal ones."""
    if hasattr(value, "detach"):
        value = value.detach().numpy()
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if isinstance(value, dict):
        return {key: plain(key, inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        if name not in IDS and value and all(isinstance(inner, int | float) for inner in value):
            return runs(value)
        return [plain(name, inner) for inner in value]
    return value


def stored(run: Path, folder: Path) -> list[Record]:
    """The rows of a run's tables as they are in its file, with JSON parsed and arrays decoded."""
    with closing(sqlite3.connect(run / "run.db")) as connection:
        connection.row_factory = sqlite3.Row

        def each(query: str) -> list[Record]:
            return [dict(row) for row in connection.execute(query)]

        names = {row["number"]: row["id"] for row in each("SELECT number, id FROM episodes")}
        found: list[Record] = []
        for task in each("SELECT * FROM tasks ORDER BY position"):
            found.append({"at": f"task {task.pop('id')}"} | normal(parsed(task, "fields"), folder))
        for episode in each("SELECT * FROM episodes ORDER BY number"):
            del episode["number"]
            found.append({"at": f"episode {episode.pop('id')}"} | normal(episode, folder))
        for entry in each("SELECT * FROM journal ORDER BY episode, attempt, seq"):
            at = f"journal {names[entry.pop('episode')]} attempt {entry.pop('attempt')} entry {entry.pop('seq')}"
            entry["at"] = 0.0
            tokens = entry.pop("tokens")
            if tokens is not None:
                half = len(tokens) // 2
                entry["output_ids"] = np.frombuffer(tokens[:half], "<i4").tolist()
                entry["logprobs"] = runs(np.frombuffer(tokens[half:], "<f4").tolist())
            found.append({"at": at} | {"time" if key == "at" else key: value for key, value in
                                       normal(parsed(entry, "payload"), folder).items()})  # fmt: skip
        for trajectory in each("SELECT * FROM trajectories ORDER BY episode"):
            at = f"trajectory {names[trajectory.pop('episode')]}"
            found.append({"at": at} | normal(parsed(trajectory, "trajectory"), folder))
        for branch in each("SELECT * FROM branches ORDER BY episode, branch"):
            at = f"branch {names[branch.pop('episode')]} {branch.pop('branch')}"
            for column, kind in (("input_ids", "<i4"), ("logprobs", "<f4"), ("weight_versions", "<i4")):
                values = np.frombuffer(branch[column], kind).tolist()
                branch[column] = values if column in IDS else runs(values)
            found.append({"at": at} | normal(parsed(branch, "spans"), folder))
        for posting in each("SELECT * FROM postings ORDER BY episode, seq"):
            found.append({"at": f"posting {names[posting.pop('episode')]} {posting.pop('seq')}"} | posting)
        for image in each("SELECT * FROM images ORDER BY digest"):
            image["bytes"] = hashlib.sha256(image["bytes"]).hexdigest()
            found.append({"at": f"image {image.pop('digest')}"} | image)
    return found


def parsed(row: Record, column: str) -> Record:
    """A row with the JSON of one column parsed; also its text where that is not compact, but for how numbers are written."""
    text = row[column].decode() if isinstance(row[column], bytes) else row[column]
    value = json.loads(text)
    compact = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    row = row | {column: value}
    return row if NUMBER.sub("0", text) == NUMBER.sub("0", compact) else row | {f"text of {column}": text}


def training(folder: Path) -> list[Record]:
    """The batch log and the metrics of a training of four steps, one thread, float32."""
    from engine.spec.load import load_spec
    from engine.store import RunHeader
    from engine.store import training as folders
    from engine.train.trainer import Trainer

    loaded = load_spec(written_spec("training", folder))
    trainer = Trainer(loaded, folders.begin(folder / "runs", RunHeader.of(loaded)))
    asyncio.run(trainer.run())
    return training_records(trainer.folder)


def training_records(folder: Path) -> list[Record]:
    """The batch log and the metrics in a training's folder."""
    found: list[Record] = []
    for line in map(json.loads, (folder / "batches.jsonl").read_text(encoding="utf-8").splitlines()):
        found.append({"at": f"batch of step {line['step']}"} | line | {"metrics": steady(line["metrics"])})
    for line in map(json.loads, (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()):
        found.append({"at": f"metrics of step {line['step']}"} | steady(line))
    return found


def steady(metrics: Record) -> Record:
    """Metrics without those that depend on the machine's speed and memory."""
    return normal({name: metrics[name] for name in sorted(metrics) if not UNSTEADY.match(name)})  # type: ignore[no-any-return]


def adapters(folder: Path) -> list[Record]:
    """What the adapters for other trainers make of one group: an episode with three rows, one with one, and one that failed."""
    from slime_kit import Sample

    from engine.plugins.trainers.areal.rows import trajectory as areal
    from engine.plugins.trainers.handover import BatchSums, one_row_each
    from engine.plugins.trainers.rollouts import TrainerRollouts
    from engine.plugins.trainers.skyrl.rows import generator_output
    from engine.plugins.trainers.slime.rows import convert, samples_of
    from engine.plugins.trainers.verl.rows import group_rows

    spec = written_spec("adapters", folder)
    rollouts = TrainerRollouts(spec, folder / "out", "verl")
    samples = rollouts.spec.rollout.samples_per_task
    batch = asyncio.run(batch_of(rollouts, "a"))
    (group,) = batch.used
    placed, empty, left_out = one_row_each(
        rollouts.final_rows(batch), 1, samples, trainer="TRL", several="leave_out", leave_out=""
    )
    one_each = {"at": "one row each", "empty": empty, "left_out": left_out}
    found: list[Record] = [one_each | {"sums": list(vars_of(BatchSums.of_rows(placed)))}]
    for number, row in enumerate(placed):
        found.append({"at": f"one row each {number}"} | {name: getattr(row, name) for name in row.__struct_fields__})
    found.append({"at": "skyrl"} | generator_output(placed, {"reward/mean": 0.5}))
    ended = {each.episode_id: each for each in group.trajectories}
    rows = [row for _, row in rollouts.final_rows(batch)]
    rewards = [ended[row.episode.episode_id].outcome.reward for row in rows]
    for name, clip in (("", 20.0), (" clipped", 0.5)):
        actor = SimpleNamespace(reward_bias=0.25, reward_scaling=2.0, reward_clip=clip)
        found.append({"at": f"areal{name}"} | areal(rows, rewards, actor=actor))
    keys, fields, tags = group_rows("uid", 3, rows, ended, {"index": 4})
    for key, columns, tag in zip(keys, fields, tags, strict=True):
        found.append({"at": f"verl {key}", "columns": columns, "tags": tag})
    args = SimpleNamespace(**slime_arguments(spec, folder, samples))
    made: list[Any] = []
    for sample in range(samples):
        slot = Sample(index=sample, group_index=0)
        made += samples_of(slot, ended.get(f"a/{sample}"), rollouts.format.decode, None)
    found.append({"at": "slime"} | convert(args, made))
    return [{name: plain(name, value) for name, value in record.items()} for record in found]


def adapters_images(folder: Path) -> list[Record]:
    """What each adapter makes of the rows with images of a group. A record has the type, shape and SHA-256 of each tensor."""
    from slime_kit import Sample

    from engine.plugins.trainers.areal.rows import trajectory as areal
    from engine.plugins.trainers.handover import BatchSums, HandedRow
    from engine.plugins.trainers.rollouts import TrainerRollouts
    from engine.plugins.trainers.skyrl.rows import generator_output
    from engine.plugins.trainers.slime.rows import convert, samples_of
    from engine.plugins.trainers.verl.rows import group_rows

    spec = written_spec("adapters-images", folder)
    rollouts = TrainerRollouts(spec, folder / "out", "verl")
    batch = asyncio.run(batch_of(rollouts, "square-3-0000"))
    (group,) = batch.used
    rows, pixels = [row for _, row in rollouts.final_rows(batch)], rollouts.pixels
    assert pixels is not None
    handed = list(map(HandedRow.of, rows))
    sums = BatchSums.of_rows(handed, pixels)
    found: list[Record] = [{"at": "sums", "sums": [*vars_of(sums), sums.images]}]
    for number, row in enumerate(handed):
        ids = [*row.prompt_ids, *row.completion_ids]
        images = pixels.row(ids, row.images)
        found.append(
            {"at": f"handed row {number}", "input_ids": ids, "position_ids": pixels.positions(ids, row.images)}
        )
        found[-1] |= {"images": row.images, "checksums": images.checksums, "tensors": hashed(images)}
    output = generator_output(handed, pixels=pixels)
    tensors = {name: [hashed(value) for value in output[name]] for name in ("pixel_values", "image_grid_thw")}
    found.append({"at": "skyrl"} | output | tensors)
    ended = {each.episode_id: each for each in group.trajectories}
    rewards = [ended[row.episode.episode_id].outcome.reward for row in rows]
    actor = SimpleNamespace(reward_bias=0.25, reward_scaling=2.0, reward_clip=20.0)
    made = areal(rows, rewards, actor=actor, pixels=pixels)
    found.append({"at": "areal"} | made | {"multi_modal_input": [hashed(each) for each in made["multi_modal_input"]]})
    for key, columns, tag in zip(*group_rows("uid", 3, rows, ended, {"index": 4}, pixels), strict=True):
        queued = columns["multi_modal_inputs"]  # it reads tensors where verl is installed; those of the rows above
        held = {"digests": queued.digests, "checksums": queued.checksums}
        held |= {"holders": queued.images.holders, "holds": list(queued.images)}
        found.append({"at": f"verl {key}", "columns": columns | {"multi_modal_inputs": held}, "tags": tag})
    samples = [Sample(index=sample, group_index=0) for sample in range(len(ended))]
    given = [made for slot in samples for made in samples_of(
        slot, ended[f"square-3-0000/{slot.index}"], rollouts.format.decode, rollouts.format.vision)]  # fmt: skip
    data = convert(SimpleNamespace(**slime_arguments(spec, folder, len(samples))), given)
    found.append(
        {"at": "slime"} | data | {"multimodal_train_inputs": list(map(hashed, data["multimodal_train_inputs"]))}
    )
    return [{name: plain(name, value) for name, value in record.items()} for record in found]


def hashed(value: Any) -> Any:
    """A tensor by its type, shape and bytes; a mapping of tensors in the same form."""
    if hasattr(value, "detach"):
        array = np.ascontiguousarray(value.detach().numpy())
        return {"dtype": str(array.dtype), "shape": list(array.shape), "sha256": hashlib.sha256(array.data).hexdigest()}
    return {name: hashed(tensor) for name, tensor in value.items()}


async def batch_of(rollouts: Any, task: str) -> Any:
    """The group of one task that a trainer asks for."""
    from engine.backends.registry import open_backend

    await rollouts.start(open_backend(rollouts.loaded, rollouts.format))
    try:
        return await rollouts.batch([task], rollouts.spec.rollout.samples_per_task, 7)
    finally:
        await rollouts.close()


def vars_of(sums: Any) -> Sequence[float]:
    """The three sums."""
    return sums.tokens, sums.trained, sums.advantages


def slime_arguments(spec: Path, folder: Path, samples: int) -> dict[str, Any]:
    """The arguments of slime that its converter reads."""
    from slime_kit import slime_args

    return vars(slime_args("http://127.0.0.1:1", spec, engine_folder=str(folder), global_batch_size=samples))


GOLDENS = [
    Golden("bytes", "training", training, 1e-5),
    *(Golden("bytes", name, partial(episodes, name)) for name in EPISODES),
    Golden("bytes", "adapters", adapters),
    Golden("bytes", "adapters-images", adapters_images),
]
