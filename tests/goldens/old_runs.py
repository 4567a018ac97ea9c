"""Old runs: a run, a sharded run, a run with an agent program and a training, none of them finished, as an earlier revision wrote them.

`old/NAME.tar.xz` is the folder of one, with its spec; `old/NAME.jsonl` is what the commands of that revision gave for it: `show`, `export`,
`replay`, `rescore`, then the same after it was resumed. A run names its spec and tokenizer by absolute paths. They are packed as `PLACE`
and become the paths of the folder in which a run is unpacked. Specs name code of the package and of `golden_code` only.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import chdir, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from golden_bytes import kill_after, plain, training_records, written_spec
from golden_kit import HELD, HERE, ROOT, Golden, Record, normal

PLACE = "/place/of/the/golden"
"""Stands for the folder of an old run."""
COMMAND = [sys.executable, "-m", "engine.cli.main"]
CALL = {"tool_calls": [{"name": "calculate", "arguments": {"expression": "2 + 3"}}]}
SUMS: dict[str, Any] = {
    "spec": "episode/v1",
    "name": "sums",
    "model": {"path": "tokenizers/tiny", "tool_calls": "hermes"},
    "backend": {"kind": "scripted", "replies": [CALL, "It is 5.", "It is 7.", "It is 9."]},
    "tasks": {"source": "python", "use": "engine.environments.arithmetic:problems", "with": {"count": 3}, "id": "id"},
    "environment": {"use": "engine.environments.arithmetic:Arithmetic"},
    "tools": [{"use": "engine.environments.tools.calculator:calculate"}],
    "user": {"use": "engine.environments.arithmetic:Teacher"},
    "machine": "tools_and_user",
    "limits": {"assistant_turns": 4},
    "rewards": {"credit": {"method": "turn_return", "gamma": 0.95}},
    "rollout": {"samples_per_task": 2, "seed": 0, "concurrency": 1, "live_episodes": 1},
}
SPECS: dict[str, dict[str, Any]] = {
    "run": SUMS,
    "sharded": SUMS
    | {
        "backend": {"kind": "scripted", "replies": "script.yaml"},
        "tasks": SUMS["tasks"] | {"with": {"count": 6}},
        "rollout": SUMS["rollout"] | {"concurrency": 4, "live_episodes": 4},
    },
    "agent": {key: SUMS[key] for key in ("spec", "name", "model", "tasks", "rewards", "rollout")}
    | {
        "backend": {"kind": "scripted", "replies": [CALL, "The answer is 5."]},
        "agent": {"run": "exec python3 -m engine.environments.agents.sums_agent", "reward_names": ["correct", "used_tool"]},
        "machine": "agent",
        "limits": {"assistant_turns": 4, "turn_tokens": 60},
    },
}  # fmt: skip
KILLED_AFTER = {"run": 26, "agent": 26}
"""Commits after which a run is killed."""


# --- writing ---


def write(names: list[str]) -> None:
    """Write old runs by this revision, and pack them."""
    for name in names:
        file = HERE / "old" / f"{name}.tar.xz"
        if file.exists():
            raise SystemExit(f"{file} was written by an earlier revision, which a later one must read: {HELD}")
        with tempfile.TemporaryDirectory(prefix="golden-") as place:
            folder = Path(place).resolve()
            WRITERS[name](folder)
            shutil.rmtree(folder / "tokenizers", ignore_errors=True)
            pack(folder, file)
        print(f"wrote {file.relative_to(ROOT)}: {file.stat().st_size:,} bytes")


def prepare(name: str, folder: Path) -> Path:
    """Write a spec and its tokenizer."""
    from shipped_tokenizers import unpack

    unpack("tiny", folder / "tokenizers")
    spec = folder / "spec.yaml"
    spec.write_text(yaml.safe_dump(SPECS[name], sort_keys=False), encoding="utf-8")
    return spec


def write_killed(name: str, folder: Path) -> None:
    """A run that was killed after a commit."""
    kill_after(prepare(name, folder), folder / "runs", KILLED_AFTER[name])


def write_sharded(folder: Path) -> None:
    """A run of two drivers that was stopped when each had finished a task and was running another: parts, and stores that have more."""
    spec, script = prepare("sharded", folder), folder / "script.yaml"
    replies = SUMS["backend"]["replies"]
    late = [{"text": reply} if isinstance(reply, str) else reply for reply in replies]
    script.write_text(yaml.safe_dump({"replies": [reply | {"delay": "500ms"} for reply in late]}), encoding="utf-8")
    places = ("--out", folder / "runs", "--set", f"rollout.shards={folder / 'published'}")

    def one_task_each() -> bool:
        done = [count(file, "status = 'done'") for file in folder.glob("runs/*/drivers/*/run.db")]
        return len(done) == 2 and min(done) >= 2

    stop_when([*COMMAND, "run", spec, "--quiet", "--set", "rollout.drivers=2", *places], one_task_each, signal.SIGINT)
    script.write_text(yaml.safe_dump({"replies": replies}), encoding="utf-8")


def count(file: Path, condition: str) -> int:
    """The number of episodes in a store for which a condition holds."""
    with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as connection:
        found: int = connection.execute(f"SELECT count(*) FROM episodes WHERE {condition}").fetchone()[0]
    return found


def write_training(folder: Path) -> None:
    """A training that was killed after its third step, with the checkpoint of its second."""
    spec = written_spec("training", folder)
    command = [*COMMAND, "train", spec, "--quiet", "--set", "train.checkpoints.every=2", "--out", folder / "runs"]

    def third_step() -> bool:
        return any(file.read_text().count("\n") >= 3 for file in folder.glob("runs/*/batches.jsonl"))

    stop_when(command, third_step, signal.SIGKILL)


def stop_when(command: list[Any], due: Callable[[], bool], how: signal.Signals) -> None:
    """Run a command, and send it a signal once a condition holds."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, [ROOT, HERE]))}
    process = subprocess.Popen(command, env=environment)
    while not due():
        if process.poll() is not None:
            raise SystemExit(f"{command} ended before it was stopped, with {process.returncode}")
        time.sleep(0.01)
    process.send_signal(how)
    process.wait()


WRITERS: dict[str, Callable[[Path], None]] = {
    "run": partial(write_killed, "run"),
    "agent": partial(write_killed, "agent"),
    "sharded": write_sharded,
    "training": write_training,
}


def pack(folder: Path, file: Path) -> None:
    """Pack a folder, its path replaced by `PLACE`, and refuse one that names it elsewhere."""
    replace_path(folder, str(folder), PLACE)
    for path in folder.rglob("*"):
        if path.is_file() and str(folder).encode() in path.read_bytes():
            raise SystemExit(f"{path} has the path of its folder")
    file.parent.mkdir(exist_ok=True)

    def plain(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        return None if member.name.endswith((".lock", "-wal", "-shm")) else member

    with tarfile.open(file, "w:xz", preset=9) as archive:
        archive.add(folder, ".", filter=plain)


def replace_path(folder: Path, before: str, after: str) -> None:
    """Replace a path in the headers of stores and in text files, and the machine of drivers' stores by this one."""
    from engine.plugins.drivers.session import machine_id

    for path in [*folder.rglob("*.db"), *folder.rglob("*.json"), *folder.rglob("*.jsonl"), *folder.rglob("*.yaml")]:
        if path.suffix == ".db":
            with closing(sqlite3.connect(path)) as connection:
                tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master")}
                if "run" in tables:
                    connection.execute("UPDATE run SET header = replace(header, ?, ?)", (before, after))
                if "stores" in tables:  # of leases: on which machine a driver's store is
                    connection.execute(
                        "UPDATE stores SET machine = ?", ("machine" if after == PLACE else machine_id(),)
                    )
                connection.commit()
                connection.execute("VACUUM")
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        else:
            path.write_text(path.read_text(encoding="utf-8").replace(before, after), encoding="utf-8")


# --- reading ---


def unpack_run(name: str, folder: Path) -> Path:
    """Unpack an old run; its folder."""
    from shipped_tokenizers import unpack

    unpack("tiny", folder / "tokenizers")
    with tarfile.open(HERE / "old" / f"{name}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    replace_path(folder, PLACE, str(folder))
    (run,) = (folder / "runs").iterdir()
    return run


@contextmanager
def apart(folder: Path) -> Iterator[Callable[..., tuple[int, str]]]:
    """`engine …` in this process, in an empty folder and with a cache of its own: exit code and output."""
    from typer.testing import CliRunner

    from engine.cli.main import app

    (folder / "elsewhere").mkdir(exist_ok=True)
    cache = os.environ.get("EPISODE_ENGINE_CACHE")
    os.environ["EPISODE_ENGINE_CACHE"] = str(folder / "cache")

    def engine(*words: Any) -> tuple[int, str]:
        result = CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "200"})
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.exit_code, result.output

    try:
        with chdir(folder / "elsewhere"):
            yield engine
    finally:
        del os.environ["EPISODE_ENGINE_CACHE"]
        if cache is not None:
            os.environ["EPISODE_ENGINE_CACHE"] = cache


def old_run(name: str, folder: Path) -> list[Record]:
    """What the commands give for an old run, as it is and after it was resumed."""
    run = unpack_run(name, folder)
    store = run / "rollouts" if name == "training" else run
    with apart(folder) as engine:
        records = read(engine, name, store, folder, "old", ())
        known = finished(records[0]["statuses"])
        records.append({"at": "resume", **RESUMES.get(name, resume_run)(engine, run)})
        records += read(engine, name, store, folder, "resumed", known)
    if name == "training":
        records += training_records(run)
    return records


def read(
    engine: Callable[..., tuple[int, str]], name: str, store: Path, folder: Path, when: str, known: Collection[str]
) -> list[Record]:
    """The exit codes and results of `show`, `replay`, `export` and `rescore`; rows of `known` episodes are not recorded again."""
    from engine.store import RunStore

    with RunStore.open(store, readonly=True) as opened:
        statuses = dict(sorted(opened.statuses().items()))
    records: list[Record] = [{"at": f"{when} episodes", "statuses": statuses}]
    code, printed = engine("show", store)
    named = [episode for episode in statuses if episode in printed]
    records.append({"at": f"{when} show", "named": named} | ended(code, printed))
    for episode in [episode for episode in finished(statuses) if episode not in known][:1]:
        code, printed = engine("show", store, episode)
        records.append({"at": f"{when} show {episode}", "is named": episode in printed} | ended(code, printed))
    code, printed = engine("replay", store)
    numbers = [int(number) for number in re.findall(r"\d+", printed)]
    records.append({"at": f"{when} replay", "episodes, tokens, the same": numbers} | ended(code, printed))
    exact = name != "training" or when == "old"
    records += exported(engine, store, folder, f"{when} export", exact=exact, without=known)
    change = ("--set", "rewards.credit.gamma=0.5", "--set", f"rewards.reassign={REASSIGN.get(name, '[]')}")
    spec, label = folder / ("training.yaml" if name == "training" else "spec.yaml"), f"of-{when}"
    code, printed = engine("rescore", store, "--spec", spec, *change, "--label", label)
    refused = 1 if name == "sharded" else 0  # a score is written into one store
    records.append({"at": f"{when} rescore"} | ended(code, printed, refused))
    other = ("--score", label) if code == 0 else ("--credit", "gamma=0.5")
    columns = ["token_rewards", "advantages", "turn_rewards", "outcome"]
    records += exported(
        engine, store, folder, f"{when} export {other[0]}", *other, exact=exact, columns=columns, without=known
    )
    return records


def ended(code: int, printed: str, expected: int = 0) -> Record:
    """The exit status of a command, and its output only where the status is not the expected one, because texts may change."""
    return {"code": code} | ({} if code == expected else {"printed": printed.splitlines()})


def finished(statuses: Mapping[str, str]) -> list[str]:
    """The episodes that are done."""
    return [episode for episode, status in statuses.items() if status == "done"]


REASSIGN = {
    "run": "[{at: AWAITING_USER_FEEDBACK, op: add, name: late, to: last, value: -0.25, cause: rescored}]",
}
"""Rules that `rescore` adds."""


def exported(
    engine: Callable[..., tuple[int, str]],
    store: Path,
    folder: Path,
    at: str,
    *words: str,
    exact: bool = True,
    columns: Sequence[str] = (),
    without: Collection[str] = (),
) -> list[Record]:
    """The rows that `export` writes, and the digest of the file where it must be the same to the byte.

    Args:
        engine: Runs a command.
        store: The run.
        folder: The folder in which it was unpacked.
        at: Where the records are from.
        words: Options of `export`.
        exact: Whether the file must be the same to the byte.
        columns: The columns that are recorded, all if there are none.
        without: Episodes whose rows are not recorded again.
    """
    file = folder / "rows.jsonl"
    code, printed = engine("export", store, "--out", file, *words)
    if code:
        return [{"at": at} | ended(code, printed)]
    data = file.read_bytes().replace(str(folder).encode(), PLACE.encode())
    records: list[Record] = [{"at": at, "code": code} | ({"sha256": hashlib.sha256(data).hexdigest()} if exact else {})]
    for row in map(json.loads, data.decode().splitlines()):
        if row["episode_id"] not in without:
            shown = {name: plain(name, row[name]) for name in columns or row}
            records.append({"at": f"{at} {row['episode_id']} branch {row['branch']}"} | normal(shown))
    return records


def resume_run(engine: Callable[..., tuple[int, str]], run: Path) -> Record:
    """`engine run --resume`"""
    code, printed = engine("run", "--resume", run, "--quiet")
    return ended(code, printed)


def resume_training(engine: Callable[..., tuple[int, str]], run: Path) -> Record:
    """`engine train --resume`"""
    code, printed = engine("train", "--resume", run, "--quiet")
    return ended(code, printed)


def resume_drivers(engine: Callable[..., tuple[int, str]], run: Path) -> Record:
    """Both drivers go on with what they had begun, in this process: `test_old_sharded_run` resumes them on a cluster."""
    from local_coordinator import Here

    from engine.plugins.drivers.leases import Leases
    from engine.plugins.drivers.run import prepare_leases
    from engine.plugins.drivers.session import Setup, run_driver
    from engine.plugins.drivers.shards import shards_of
    from engine.spec.tasks import load_tasks
    from engine.store import RunStore

    with RunStore.open(run, readonly=True) as store:
        loaded, header = store.header.loaded_spec(strict=True), store.header
    tasks = load_tasks(loaded)
    prepare_leases(run, tasks, 2, loaded.spec.rollout.samples_per_task)
    leases = Leases(run / "leases.db", len(tasks))
    here, setup = Here(leases), Setup.of(loaded, header, run, shards=shards_of(run))

    async def drive() -> list[str]:
        return [done.store for done in await asyncio.gather(*(run_driver(setup, slot, here) for slot in range(2)))]

    stores = asyncio.run(drive())
    left = leases.counts.free + leases.counts.leased
    leases.close()
    return {"stores": stores, "groups left": left}


RESUMES = {"training": resume_training, "sharded": resume_drivers}
GOLDENS = [
    Golden("old", "old-training", partial(old_run, "training"), 1e-5),
    *(Golden("old", f"old-{name}", partial(old_run, name)) for name in ("run", "sharded", "agent")),
]
