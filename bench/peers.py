"""Other libraries as subjects of rollout.py, each in a process of its own with the Python that has it installed.

    SKYRL_PYTHON=~/envs/skyrl/bin/python python bench/rollout.py --measure cost --peer skyrl

A module `peer_NAME.py` drives the library's own multi-turn rollout code against the fake server:

    def episodes(workload, url, turns, episodes, concurrency) -> Peer      # objects and data are made here
    await peer.run()                                                       # measured: from the first episode to the last
    peer.check()                                                           # not measured: refuses a peer that did less
    def close()                                                            # optional: what must end with the process

`Subject` starts `python bench/peers.py NAME MODEL` with the Python of the variable NAME_PYTHON, or with this one, and sends it
one line of JSON for each measurement. What the server counted decides whether the peer did the workload's work.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import re
import subprocess
import sys
import time
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol
from urllib.request import urlopen

from floor import OBSERVATION, PROBLEM, QUESTION, Workload

PEERS = ("verifiers", "skyrl", "verl", "slime", "trl")
WITHOUT_IDS = ("verifiers",)
"""Peers that talk to a chat endpoint: they send messages, and get no ids and no log-probs."""

SAID = OBSERVATION.partition("<tool_response>\n")[2].partition("\n</tool_response>")[0]
CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)

calls = 0
"""Calls of the tool so far in this process."""


def answer(expression: str) -> str:
    """What the workload's tool says."""
    global calls
    calls += 1
    return SAID.format(expression, 422)


def messages(*, schema: bool) -> list[dict[str, str]]:
    """The conversation that begins an episode: about 350 tokens, 150 of which are the tool's schema if the template shows it."""
    filler = PROBLEM.format(a=17, b=25, c=3) * (4 if schema else 9)
    return [{"role": "system", "content": QUESTION}, {"role": "user", "content": filler + "This is shop 7."}]


class Peer(Protocol):
    """One measurement of a peer."""

    async def run(self) -> None:
        """Take all turns of all episodes."""

    def check(self) -> None:
        """Raise AssertionError where rows are missing, or sampled tokens or log-probs are not those of the server."""


def check_row(ids: list[int], mask: list[int], logprobs: list[float] | None, workload: Workload, turns: int) -> None:
    """Refuse a row that does not hold each sampled token once, with a log-prob."""
    sampled = [token for token, trained in zip(ids, mask, strict=True) if trained]
    assert sampled == workload.reply * turns, (len(sampled), len(workload.reply) * turns)
    scored = sum(value != 0.0 for value in logprobs or [])
    assert scored == len(sampled), f"{scored} log-probs for {len(sampled)} sampled tokens"


class Subject:
    """A peer in its process. Called as the other subjects of rollout.py."""

    def __init__(self, name: str, model: Path) -> None:
        self.name = name
        python = os.environ.get(f"{name.upper()}_PYTHON", sys.executable)
        self._command = [python, str(Path(__file__)), name, str(model.resolve())]

    @cached_property
    def _process(self) -> subprocess.Popen[str]:
        return subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    async def __call__(
        self, url: str, workload: Workload, turns: int, episodes: int, concurrency: int
    ) -> tuple[int, float, float]:
        """(turns taken, CPU seconds, wall seconds) of so many episodes."""
        before = _stats(url)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([url, turns, episodes, concurrency]), file=self._process.stdin, flush=True)
        reply = self._process.stdout.readline()
        if not reply:
            raise SystemExit(f"the peer {self.name} stopped; its error is above")
        result = json.loads(reply)
        if "refused" in result:
            raise SystemExit(f"the peer {self.name} did not do the workload's work: {result['refused']}")
        counts = {name: value - before[name] for name, value in _stats(url).items()}
        self._check(counts, result["calls"], workload, turns, episodes)
        return turns * episodes, result["cpu"], result["wall"]

    def _check(self, counts: dict[str, int], tool_calls: int, workload: Workload, turns: int, episodes: int) -> None:
        taken = turns * episodes
        assert counts["requests"] == taken, f"{self.name}: {counts['requests']} requests, {taken} turns"
        # An episode's last call may be left out, since its observation is never shown.
        assert taken - episodes <= tool_calls <= taken, f"{self.name}: {tool_calls} tool calls, {taken} turns"
        if self.name in WITHOUT_IDS:
            return
        assert counts["scored"] == taken, f"{self.name}: {counts['scored']} of {taken} requests asked for log-probs"
        added = len(workload.reply) + len(workload.observation)
        tokens = sum(len(workload.prompt) + turn * added for turn in range(turns)) * episodes
        assert 0.9 < counts["prompt_tokens"] / tokens < 1.1, (
            f"{self.name}: prompts of {counts['prompt_tokens']} tokens, {tokens}"
        )

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def _stats(url: str) -> dict[str, int]:
    with urlopen(f"{url}/fake/stats") as reply:
        stats = json.load(reply)
    return {name: stats[name] for name in ("requests", "prompt_tokens", "scored")}


async def _measure(module: Any, workload: Workload, arguments: list[Any]) -> dict[str, Any]:
    url, turns, episodes, concurrency = arguments
    peer: Peer = module.episodes(workload, url, turns, episodes, concurrency)
    before, began, wall = calls, time.process_time(), time.perf_counter()
    await peer.run()
    result = {"cpu": time.process_time() - began, "wall": time.perf_counter() - wall, "calls": calls - before}
    try:
        peer.check()
    except AssertionError as error:
        return {"refused": str(error)}
    return result


def main() -> None:
    """Measure what the lines of the standard input ask for: `peers.py NAME MODEL`."""
    from tokenizers import Tokenizer

    name, model = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print
    sys.modules["peers"] = sys.modules["__main__"]  # so that a peer counts its calls here
    workload = Workload.of(Tokenizer.from_file(f"{model}/tokenizer.json"), model=model)
    module = importlib.import_module(f"peer_{name}")
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    for line in sys.stdin:
        result = loop.run_until_complete(_measure(module, workload, json.loads(line)))
        print(json.dumps(result), file=answers, flush=True)
    if hasattr(module, "close"):
        module.close()
    os._exit(0)  # without waiting for the threads of libraries


if __name__ == "__main__":
    main()
