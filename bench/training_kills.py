"""Kill a training many times with SIGKILL, resume it each time, and count what was repeated, lost or trained twice.

    python bench/training_kills.py                                                 twenty kills, episodes of 24 turns
    python bench/training_kills.py --kills 50 --turns 3 --staleness 2 --oversample 1.25 --steps 40

The model is the catalogue's tiny one, on one core. Each kill comes after a random number of journal entries and a random delay
(both from `--seed`), so it can hit sampling, an update, a weight push, a checkpoint or a line of metrics. What was sampled is
read from the run stores of the training, what was trained from a log that this script keeps of each finished update.

A step that is done again after a kill replaces the earlier one, because the weights of the earlier one are gone. "Trained twice"
counts groups that are in two different steps of the training that remains.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sqlite3
import sys
import tempfile
import time
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

SAMPLES = 4


def spec_of(args: argparse.Namespace) -> dict[str, Any]:
    """A training with `args.turns` turns per episode. The reward is the share of vowels, so groups differ."""
    return {
        "spec": "episode/v1",
        "name": "kills",
        "model": {"path": "tiny-qwen2"},
        "backend": {"kind": "local", "dtype": "float32", "max_batch": 16},
        "tasks": tasks_of(args.mix),
        "prompt": [{"role": "user", "content": "Say {{say}}."}],
        "user": {"use": "training_kills:Listener", "with": {"turns": args.turns}},
        "machine": {
            "preset": "tools_and_user",
            "transitions": [{"trigger": "truncated", "source": "GENERATING", "dest": "AWAITING_USER_FEEDBACK"}],
        },
        "limits": {
            "turn_tokens": 4,
            "assistant_turns": args.turns + 1,
            "user_turns": args.turns + 1,
            "episode_tokens": 64 + 16 * args.turns,
        },
        "rewards": {"credit": {"method": "turn_return", "gamma": 0.5}},
        "rollout": {"samples_per_task": SAMPLES, "seed": args.seed},
        "train": {
            "steps": args.steps,
            "tasks_per_step": 4,
            "optimizer": {"lr": 0.003},
            "checkpoints": {"every": args.checkpoint_every, "keep": 2},
            "asynchrony": {"max_staleness": args.staleness, "oversample": args.oversample},
            **(
                {"difficulty": {"window": 4, "low": 0.3, "keep": 0.2, "solved_at": 0.4 * args.turns}}
                if args.difficulty
                else {}
            ),
        },
    }


def tasks_of(mix: bool) -> dict[str, Any]:
    """Ten tasks; with `mix`, of two sources with the weights 3 and 1."""

    def rows(count: int) -> dict[str, Any]:
        return {"source": "inline", "id": "id", "rows": [{"id": f"t{n}", "say": f"word {n}"} for n in range(count)]}

    return {"source": "mix", "mix": {"a": rows(4) | {"weight": 3}, "b": rows(6)}} if mix else rows(10)


class Listener:
    """Asks for more until the last turn, and rewards vowels. Episodes differ in length: from half of `turns` to `turns`."""

    def __init__(self, turns: int = 24) -> None:
        self._turns = turns

    def respond(self, view: Any) -> Any:
        from engine.schemas.environment import UserTurn
        from engine.schemas.reward import RewardEvent

        letters = [letter for letter in view.reply.lower() if letter.isalpha()]
        value = sum(letter in "aeiou" for letter in letters) / len(letters) if letters else 0.0
        reward = RewardEvent(name="vowels", value=value, turn="last")
        last = self._turns - zlib.crc32(view.episode_id.encode()) % (self._turns // 2 + 1)
        return UserTurn(content="More.", satisfied=view.turn + 1 >= last, rewards=[reward])


def launch(command: list[str], folder: Path) -> int:
    """Start `engine train` in a forked process, which has every package loaded already. Returns its process id."""
    process = os.fork()
    if process:
        return process
    status = 1
    try:
        output = os.open(folder / "output.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        _train(command, folder / "trained.jsonl")
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:  # noqa: BLE001  the forked process ends here
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def _train(command: list[str], log: Path) -> None:
    import torch

    from engine.cli.main import app
    from engine.train.trainer import Trainer

    torch.set_num_threads(1)
    learn: Any = Trainer._learn_batch

    async def learn_and_log(self: Any, batch: Any, *more: Any) -> Any:
        told = await learn(self, batch, *more)
        groups = [(number, batch.record.tasks[str(number)]) for number in batch.record.used]
        with log.open("a") as file:
            file.write(json.dumps({"step": self.state.step + 1, "groups": groups, "pid": os.getpid()}) + "\n")
        return told

    Trainer._learn_batch = learn_and_log  # type: ignore[method-assign,assignment]
    app(["train", *command], standalone_mode=True)


def stores_of(training: Path) -> list[Path]:
    """The run stores of a training."""
    return sorted(path for path in training.glob("rollouts*/run.db"))


def rows_of(store: Path, query: str) -> list[tuple[Any, ...]]:
    """Rows of one store."""
    try:
        with sqlite3.connect(f"file:{store}?mode=ro", uri=True) as connection:
            return connection.execute(query).fetchall()
    except sqlite3.Error:
        return []


def entries_of(training: Path) -> int:
    """Journal entries in all stores."""
    return sum(row[0] for store in stores_of(training) for row in rows_of(store, "SELECT count(*) FROM journal"))


def running_of(training: Path) -> dict[str, int]:
    """Episodes that have journaled generations and are not done, with the number of those, over all stores."""
    query = (
        "SELECT e.id, count(*) FROM episodes e JOIN journal j ON j.episode = e.number AND j.attempt = e.attempt "
        "WHERE e.status = 'running' AND j.kind = 'generation' GROUP BY e.id"
    )
    return {name: count for store in stores_of(training) for name, count in rows_of(store, query)}


def wait(process: int) -> int:
    """Wait for a process; its exit status, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The training with its kills. Returns the counts."""
    import yaml

    spec = folder / "spec.yaml"
    spec.write_text(yaml.safe_dump(spec_of(args)))
    chance = random.Random(args.seed)
    entries_per_step = 4 * SAMPLES * (2 * args.turns + 1)
    kills, running, generations = 0, 0, 0
    begin = [str(spec), "--out", str(folder / "runs")]
    killed_at: list[int] = []
    while True:
        found = sorted((folder / "runs").glob("*/train.json"))
        training = found[0].parent if found else None
        process = launch(["--resume", str(training)] if training else begin, folder)
        before = entries_of(training) if training else 0
        target = before + chance.randint(1, int(entries_per_step * args.spread)) if kills < args.kills else None
        delay = chance.random() * 0.3
        status = None
        while target is not None:
            done, code = os.waitpid(process, os.WNOHANG)
            if done:
                status = os.waitstatus_to_exitcode(code)
                break
            found = sorted((folder / "runs").glob("*/train.json"))
            if found and entries_of(found[0].parent) >= target:
                time.sleep(delay)
                os.kill(process, signal.SIGKILL)
                wait(process)
                kills += 1
                alive = running_of(found[0].parent)
                killed_at.append(len(alive))
                running += len(alive)
                generations += sum(alive.values())
                break
            time.sleep(0.005)
        if target is None:
            status = wait(process)
        if status is not None:
            break
    (training,) = [path.parent for path in (folder / "runs").glob("*/train.json")]
    return counts_of(training, folder, args) | {
        "exit_status": status, "kills": kills, "running_at_kills": running, "their_generations": generations,
    }  # fmt: skip


def counts_of(training: Path, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """What was sampled twice, trained twice or never finished."""
    turns: dict[tuple[str, int], list[int]] = {}
    done: Counter[str] = Counter()
    failed: Counter[str] = Counter()
    unfinished = 0
    for store in stores_of(training):
        query = (
            "SELECT e.id, j.attempt, j.seq, j.tokens, j.payload FROM journal j JOIN episodes e ON e.number = j.episode"
        )
        place: Counter[tuple[str, int]] = Counter()
        rows = rows_of(store, query + " WHERE j.kind = 'generation' ORDER BY j.episode, j.attempt, j.seq")
        for name, attempt, _, tokens, _ in rows:
            turn = place[name, attempt]
            place[name, attempt] += 1
            turns.setdefault((name, turn), []).append(len(tokens or b"") // 8)  # an id and a log-prob, 4 bytes each
        for name, status, failure in rows_of(store, "SELECT id, status, failure FROM episodes"):
            done[name] += status == "done"
            unfinished += status != "done"
            if failure:
                failed[failure] += 1
    consumed: set[int] = set()
    if (training / "batches.jsonl").exists():  # older engines have none
        for line in (training / "batches.jsonl").read_text().splitlines():
            record = json.loads(line)
            consumed.update([*record["used"], *record["left_out"], *record["dropped"]])
    steps: dict[int, list[Any]] = {}
    for line in (folder / "trained.jsonl").read_text().splitlines():
        made = json.loads(line)
        steps[made["step"]] = made["groups"]
    trained = Counter(number for groups in steps.values() for number, _ in groups)
    lines = [json.loads(line) for line in (training / "metrics.jsonl").read_text().splitlines()]
    told = [line["step"] for line in lines]
    return {
        "steps": args.steps,
        "metrics_complete": told == list(range(1, args.steps + 1)),
        "generations": sum(map(len, turns.values())),
        "tokens": sum(map(sum, turns.values())),
        "regenerated_generations": sum(len(each) - 1 for each in turns.values()),
        "regenerated_tokens": sum(sum(each[1:]) for each in turns.values()),
        "episodes_finished_twice": sum(count > 1 for count in done.values()),
        "groups_trained": len(trained),
        "groups_consumed": len(consumed),
        "groups_begun": len({name.rpartition("/")[0] for name in done}),
        "groups_trained_twice": sum(count > 1 for count in trained.values()),
        "failed": dict(failed),
        "unfinished_at_end": unfinished,
        "shown_regenerated_tokens": sum(line.get("rollout/regenerated_tokens", 0) or 0 for line in lines),
        "shown_resumed_episodes": sum(line.get("rollout/resumed_episodes", 0) or 0 for line in lines),
        "shown_dropped_stale_groups": sum(line.get("rollout/dropped_stale_groups", 0) or 0 for line in lines),
    }


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--turns", type=int, default=24)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--spread", type=float, default=1.0, help="most journal entries between two kills, in steps")
    parser.add_argument("--checkpoint-every", type=int, default=3)
    parser.add_argument("--staleness", type=int, default=0)
    parser.add_argument("--oversample", type=float, default=1.0)
    parser.add_argument("--mix", action="store_true", help="tasks of two sources, with the weights 3 and 1")
    parser.add_argument(
        "--difficulty", action="store_true", help="draw tasks less often that are always or never solved"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path)
    return parser.parse_args(arguments)


def main() -> None:
    """Run and print the counts."""
    import transformers  # noqa: F401  (loaded before the forks)

    import engine.cli.train
    import engine.train.trainer  # noqa: F401

    args = parse()
    folder = args.folder or Path(tempfile.mkdtemp(prefix="kills-"))
    folder.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    told = run(args, folder)
    print(json.dumps(told | {"seconds": round(time.perf_counter() - began), "folder": str(folder)}, indent=2))


if __name__ == "__main__":
    main()
