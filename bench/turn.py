"""What the engine itself costs a turn: CPU time with an instant scripted backend and the journal on.

    python bench/turn.py                 # 4, 16 and 64 turns, 64 episodes at once
    python bench/turn.py --profile 16    # where it goes

The baseline is a bare asyncio loop of as many episodes, which only tokenises what each step adds: the prompt, then the
reply's text and the observation of each turn. (The scripted backend has tokenised its replies before the clock starts, as a
server would hand over ids; the engine decodes and reads them instead.) Both run in this process, one after the other, several rounds; the ratio is what counts.
`growth` is the cost of turns 17 to 64 over that of turns 5 to 16.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

REPLY = (
    "Let me think about what is asked here, step by step, before anything is looked up. The train leaves at nine and "
    "covers the first part of its way in forty minutes, so that the rest takes it until a quarter past eleven. I do not "
    "know how long the second stop is, and it matters for the result, since the two parts have to add up to the whole. "
    "The table has it in its third column, and the note below says how it was measured, which I should read as well. "
    "So I look it up now and go on from there.\n<call>look_up(second stop of the train)</call>"
)
SYSTEM = "You answer questions about trains. " * 40
OBSERVATION = "The second stop lasts for twelve minutes on working days and for nine on others, as measured at the platform in the spring."


def reply_of(episode: int, turn: int) -> str:
    """Every reply is another, so that each is tokenised."""
    return f"{episode}.{turn}: {REPLY}"


async def look_up(query: str) -> str:
    """Look something up.

    Args:
        query: What to look up.
    """
    return OBSERVATION


def make_spec(folder: Path, turns: int, episodes: int, model: str) -> Path:
    import yaml

    spec = {
        "spec": "episode/v1",
        "name": f"turns-{turns}",
        "model": {"path": model, "tool_calls": "plain", "tool_role": "user", "context": 1_000_000},
        "backend": {
            "kind": "scripted",
            "replies": [
                {"task": f"t{n}", "replies": [reply_of(n, turn) for turn in range(turns)]} for n in range(episodes)
            ],
        },
        "sampling": {"max_new_tokens": 512},
        "tasks": {"source": "inline", "rows": [{"id": f"t{n}"} for n in range(episodes)], "id": "id"},
        "prompt": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": "When does the train {{id}} arrive?"},
        ],
        "tools": [{"use": "turn:look_up"}],
        "machine": "tools",
        "limits": {"assistant_turns": turns, "tool_calls": None, "turn_tokens": 512, "episode_tokens": 1_000_000},
        "rollout": {"concurrency": episodes},
    }
    path = folder / f"turns-{turns}.yaml"
    path.write_text(yaml.safe_dump(spec))
    return path


async def engine_once(loaded: Any, chat_format: Any, folder: Path) -> tuple[float, int]:
    """CPU seconds of one run, and its turns."""
    from engine.backends.registry import open_backend
    from engine.runner.runner import Runner
    from engine.spec.tasks import load_tasks
    from engine.store import RunHeader, RunStore

    backend = open_backend(loaded, chat_format)
    await backend.start()
    store = RunStore.create(folder, RunHeader.of(loaded))
    runner = Runner(loaded, load_tasks(loaded), chat_format, backend, store)
    gc.collect()
    began = time.process_time()
    result = await runner.run()
    spent = time.process_time() - began
    assert not result.faults, result.faults
    assert result.summary.outcomes == {"limit: assistant_turns": len(load_tasks(loaded))}, result.summary.outcomes
    await backend.close()
    store.close()
    return spent, sum(int(reached) for _, reached in result.summary.turn_rewards)


async def bare_once(tokenizer: Any, turns: int, episodes: int) -> tuple[float, int]:
    """CPU seconds of the bare loop, and its turns."""

    async def episode(number: int) -> int:
        ids = list(tokenizer.encode(f"{SYSTEM}\nWhen does the train t{number} arrive?", add_special_tokens=False).ids)
        for turn in range(turns):
            ids += tokenizer.encode(reply_of(number, turn), add_special_tokens=False).ids
            await asyncio.sleep(0)
            ids += tokenizer.encode(OBSERVATION, add_special_tokens=False).ids
            await asyncio.sleep(0)
        return len(ids)

    gc.collect()
    began = time.process_time()
    await asyncio.gather(*(episode(number) for number in range(episodes)))
    return time.process_time() - began, turns * episodes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="whose tokenizer and template")
    parser.add_argument("--profile", type=int, metavar="TURNS", help="profile one run of so many turns instead")
    parser.add_argument("--rows", default=45, help="of the profile")
    options = parser.parse_args()

    import structlog

    from engine.spec.load import load_spec
    from engine.tokens.loading import load_format

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(30))
    folder = Path(tempfile.mkdtemp(prefix="bench-turn-"))
    try:
        counts = [options.profile] if options.profile else [4, 16, 64]
        loaded = {turns: load_spec(make_spec(folder, turns, options.episodes, options.model)) for turns in counts}
        chat_format = load_format(loaded[counts[0]].spec.model, folder)
        tokenizer = chat_format.tokenizer.backend_tokenizer
        if options.profile:
            import cProfile
            import pstats

            asyncio.run(engine_once(loaded[options.profile], chat_format, folder))
            profile = cProfile.Profile()
            profile.enable()
            asyncio.run(engine_once(loaded[options.profile], chat_format, folder))
            profile.disable()
            pstats.Stats(profile).sort_stats("tottime").print_stats(int(options.rows))
            return
        ours: dict[int, list[float]] = {turns: [] for turns in counts}
        bare: dict[int, list[float]] = {turns: [] for turns in counts}
        for round_ in range(options.rounds + 1):
            for turns in counts:
                spent, done = asyncio.run(engine_once(loaded[turns], chat_format, folder))
                base, base_done = asyncio.run(bare_once(tokenizer, turns, options.episodes))
                if round_:  # the first one warms up
                    ours[turns].append(spent / done * 1e6)
                    bare[turns].append(base / base_done * 1e6)
        print(
            f"{options.episodes} episodes at once, {len(tokenizer.encode(REPLY).ids)} tokens a reply, median of {options.rounds} rounds"
        )
        print("| turns | engine, CPU µs a turn | bare loop | ratio |\n|---|---|---|---|")
        for turns in counts:
            a, b = statistics.median(ours[turns]), statistics.median(bare[turns])
            ratio = statistics.median(x / y for x, y in zip(ours[turns], bare[turns], strict=True))
            print(f"| {turns} | {a:.0f} | {b:.0f} | {ratio:.2f} |")
        cost = {turns: [value * turns for value in ours[turns]] for turns in counts}
        growth = statistics.median(
            ((c64 - c16) / 48) / ((c16 - c4) / 12) for c4, c16, c64 in zip(cost[4], cost[16], cost[64], strict=True)
        )
        print(f"growth (turns 17–64 over 5–16): {growth:.2f}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
