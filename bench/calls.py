"""Calls that a turn makes: a count of work that does not depend on the machine.

    python bench/calls.py                              # three workloads at 16 turns
    python bench/calls.py --turns 4 16 64 --workloads plain
    python bench/calls.py --promises                   # by what the calls are for
    python bench/calls.py --files                      # the files of the engine that a traced episode runs
    python bench/calls.py --check                      # exit status 1 where a count is more than 2 % above size.txt
    python bench/calls.py --record                     # writes the counts that fell to size.txt, as scripts/size.py does
    PYTHONPATH=OTHER_CHECKOUT python bench/calls.py    # another revision, measured in the same way

A turn is one of `engine run` with the journal on, against a fake of SGLang in the same loop. The fake waits for 64 requests and
answers them at once, 50 ms later, and what is called on its behalf is left out. The figures of a turn are those of a run of 256 episodes
less those of a run of 128, over the turns between, after a run that warms up; all threads are counted. They vary by about 5 with
how many tool calls and rows of the journal one round of a loop takes.

    python      calls of Python functions; resuming a coroutine counts once for each frame that is resumed
    c           calls of functions written in C
    functions   distinct Python functions that run more than half a time a turn
    frames      coroutines between the episode's task and the future that it waits for: for a reply, for a tool
    resumed     how often the episode's task is resumed
    guard       Python and C calls in the process that checks ended episodes

Workloads: `plain`, that of rollout.py; `loose`, whose replies have white space before the call that the template trims; `thinking`,
whose replies reason first. All with Qwen3's tokenizer and template.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import structlog

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/kit"))
sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
sys.path.append(str(Path(__file__).parents[1]))  # behind a checkout that PYTHONPATH names

import fake_sglang
import size
import subject
from fake_sglang import Call, FakeSGLang
from floor import Workload
from shipped_tokenizers import unpack

ROOT = Path(__file__).parents[1]
BATCH = 64
"""Requests that the fake answers at once."""
EPISODES = (128, 256)
LATENCY = 0.05
"""Seconds until it answers them: far less than a server takes, and more than the commit of what came before."""
IDLE = 0.1
"""Seconds without a request after which the fake answers those that it has."""

THOUGHTS = "First I work out how many apples there are in all of the crates together. " * 7
CALL = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "17 * 25 - 3"}}\n</tool_call>'
WORKLOADS: dict[str, str | None] = {
    "plain": None,
    "loose": f"{THOUGHTS}So I ask: \n\n{CALL} ",
    "thinking": f"<think>\n{THOUGHTS}\n</think>\n\n{CALL}",
}
"""What each reply says; None for the reply of rollout.py."""
PROMISES: list[tuple[str, tuple[str, ...]]] = [
    ("state machine, guards, limits", ("engine/machine/", "engine/limits.py")),
    ("answers can be stored and read back", ("engine/storable.py",)),
    ("deadlines", ("engine/deadline.py", "engine/actions/calling/interrupt.py")),
    (
        "spec code in a thread of its own, watched",
        ("engine/actions/calling/", "engine/actions/toolbox.py"),
    ),
    ("executor, actions, episode", ("engine/episode/executor.py", "engine/episode/episode.py", "engine/actions/")),
    ("journal before effects", ("engine/store/",)),
    (
        "exact bridges",
        ("engine/tokens/bridge/",),
    ),
    ("views, quoting, literals", tuple(f"engine/tokens/{name}.py" for name in ("views",))),
    (
        "prompt and tape",
        tuple(f"engine/tokens/{name}.py" for name in ("tape", "conversation")),
    ),
    ("parsing of the reply", ("engine/tokens/reply_", "engine/tokens/toolcalls/")),
    ("ids from text and back", ("engine/tokens/",)),
    ("ledger and rules", ("engine/rewards/",)),
    ("HTTP", ("engine/plugins/servers/http/",)),
    (
        "request, reply, servers",
        ("engine/backends/", "engine/plugins/servers/", "engine/schemas/generation.py", "schemas/generation.py"),
    ),
    ("runner, live display", ("engine/runner/", "engine/cli/")),
    ("building records", ("<string>", "engine/schemas/", "schemas/")),
]
"""By files: what a call is for. A call of a library counts for the file of the engine that led to it."""
LOOP = "asyncio and system calls"


class BatchedFake(FakeSGLang):
    """Answers requests when it has `BATCH` of them, all in one callback, in no task of its own."""

    def __init__(self, output: list[int], vocab_size: int) -> None:
        super().__init__(output=output, vocab_size=vocab_size, context=1 << 20)
        self.waiting: list[Call] = []
        self.before_answers: Callable[[], None] = lambda: None
        self._timer: asyncio.TimerHandle | None = None

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        server = await asyncio.get_running_loop().create_server(
            lambda: DirectConnection(self), host, port, backlog=4096
        )
        return f"http://{host}:{server.sockets[0].getsockname()[1]}"

    def take(self, call: Call) -> None:
        """One more request."""
        self.waiting.append(call)
        if self._timer is not None:
            self._timer.cancel()
        seconds = LATENCY if len(self.waiting) == BATCH else IDLE
        self._timer = asyncio.get_running_loop().call_later(seconds, self._answer)

    def _answer(self) -> None:
        self.before_answers()
        calls, self.waiting = self.waiting, []
        for call in calls:
            call.answer(call.reply())


class DirectConnection(fake_sglang._Connection):
    """Takes requests for samples without a task."""

    def data_received(self, data: bytes) -> None:
        if not self._buffer and not data.startswith(b"POST /generate "):
            super().data_received(data)
            return
        self._buffer += data
        head, _, body = bytes(self._buffer).partition(b"\r\n\r\n")
        length = head.find(b"Content-Length: ") + 16
        if len(body) == int(head[length:].partition(b"\r\n")[0]):
            self._buffer.clear()
            self._fake.take(Call(self._fake, self, body))  # type: ignore[attr-defined]


class Calls:
    """Counts calls by function, in all threads that start after `start`.

    Args:
        promises: Find what each call is for.
    """

    def __init__(self, promises: bool) -> None:
        self._promises = promises
        self.python: Counter[tuple[CodeType, str]] = Counter()
        """By the function that is called and what it is called for."""
        self.c: Counter[str] = Counter()
        """By what it is called for."""
        self._of_file: dict[str, str] = {}
        self._of_fake = 0
        """Frames on the stack at and above the first one of the fake."""

    def start(self) -> None:
        threading.setprofile(self._count)
        sys.setprofile(self._count_main)

    def stop(self) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]

    def snapshot(self) -> tuple[Counter[tuple[CodeType, str]], Counter[str]]:
        return self.python.copy(), self.c.copy()

    def _count_main(self, frame: FrameType, event: str, arg: object) -> None:
        if self._of_fake:
            self._of_fake += (event == "call") - (event == "return")
        elif event == "call" and _is_of_fake(frame):
            self._of_fake = 1
        else:
            self._count(frame, event, arg)

    def _count(self, frame: FrameType, event: str, arg: object) -> None:
        if event == "call":
            self.python[frame.f_code, self._promise(frame)] += 1
        elif event == "c_call":
            self.c[self._promise(frame)] += 1

    def _promise(self, frame: FrameType | None) -> str:
        """What a frame runs for: the promise of its file, or of the nearest frame below that is of the engine."""
        if not self._promises:
            return ""
        while frame is not None:
            file = frame.f_code.co_filename
            promise = self._of_file.get(file)
            if promise is None:
                promise = self._of_file[file] = _promise_of(file)
            if promise:
                return promise
            frame = frame.f_back
        return LOOP


def _is_of_fake(frame: FrameType) -> bool:
    """Whether the fake, or asyncio on its behalf, is called."""
    code = frame.f_code
    if code.co_filename in (fake_sglang.__file__, __file__):
        return True
    if code.co_name == "_run" and code.co_filename.endswith("asyncio/events.py"):
        owner = getattr(frame.f_locals["self"]._callback, "__self__", None)
        return isinstance(owner, BatchedFake) or isinstance(getattr(owner, "_protocol", None), fake_sglang._Connection)
    return False


def _promise_of(file: str) -> str:
    """The promise of a file; empty for a library."""
    path = file if file == "<string>" else _in_engine(file)
    if not path:
        return LOOP if "/asyncio/" in file or file.endswith("selectors.py") else ""
    return next((name for name, starts in PROMISES if path.startswith(starts)), f"other: {path}")


def _in_engine(file: str) -> str:
    """A file of the engine from the checkout's root on; empty for another."""
    import engine

    root = str(Path(engine.__file__).parents[1]) + "/"
    path = file.removeprefix(root)
    return path if path != file and path.startswith(("engine/", "schemas/", "environments/")) else ""


GUARD_HOOK = """
import os, sys
if any("engine.processes.worker" in word for word in sys.orig_argv):
    counts = [0, 0]
    def profile(frame, event, arg):
        if event == "call":
            counts[0] += 1
        elif event == "c_call":
            counts[1] += 1
            if arg.__name__ == "flush":
                with open(os.environ["BENCH_CALLS"], "w") as file:
                    print(*counts, file=file)
    sys.setprofile(profile)
"""
"""Runs at the start of a child process, and writes its counts with each answer."""


class GuardCalls:
    """Counts calls in the process that checks ended episodes. Made before it starts."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "counts"
        (folder / "sitecustomize.py").write_text(GUARD_HOOK)
        os.environ["BENCH_CALLS"] = str(self._file)
        sys.path.insert(0, str(folder))

    def snapshot(self) -> tuple[int, int]:
        """Python and C calls so far; 0 in a revision without such a process."""
        python, c = self._file.read_text().split() if self._file.exists() else (0, 0)
        return int(python), int(c)


class Turn(NamedTuple):
    """What one turn costs."""

    python: float
    c: float
    functions: int
    frames: tuple[int, int]
    """For a reply, for a tool."""
    resumed: float
    guard: tuple[float, float]
    """Python and C calls of the process that checks ended episodes."""
    promises: dict[str, tuple[float, float]]
    """By promise: Python calls, C calls."""
    repeated: list[str]
    """Files of the engine that turns run, some function at least half a time a turn."""
    once: list[str]
    """Other files of the engine that an episode runs."""


class Frames:
    """Looks at the tasks of episodes while they wait."""

    def __init__(self) -> None:
        self.reply = self.tool = 0
        self.codes: set[CodeType] = set()
        """The outermost coroutines of episodes' tasks."""

    def waiting_for_reply(self) -> None:
        for codes in self._episodes(asyncio.get_running_loop()):
            if not _is_for_tool(codes):
                self.reply = max(self.reply, len(codes))

    def waiting_for_tool(self, loop: asyncio.AbstractEventLoop) -> None:
        for codes in self._episodes(loop):
            if _is_for_tool(codes):
                self.tool = max(self.tool, len(codes))

    def _episodes(self, loop: asyncio.AbstractEventLoop) -> Iterator[list[CodeType]]:
        for task in list(asyncio.all_tasks(loop)):
            codes = []
            coroutine: Any = task.get_coro()
            while hasattr(coroutine, "cr_await"):
                codes.append(coroutine.cr_code)
                coroutine = coroutine.cr_await
            if any(code.co_filename.endswith("executor.py") for code in codes):
                self.codes.add(codes[0])
                yield codes


def _is_for_tool(codes: list[CodeType]) -> bool:
    return any(Path(code.co_filename).stem in ("toolbox", "call_tools") for code in codes)


async def measure(guard: GuardCalls, model: Path, text: str | None, turns: int, *, promises: bool = False) -> Turn:
    """The calls of a turn of episodes of so many turns.

    Args:
        guard: Counts in the process that checks ended episodes.
        model: A folder with Qwen3's tokenizer and template.
        text: Every reply; None for the one of rollout.py.
        turns: Turns of an episode.
        promises: Find what each call is for, which takes eight times as long.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    workload = Workload.of(tokenizer)
    reply = workload.reply if text is None else tokenizer.encode(f"{text}<|im_end|>", add_special_tokens=False).ids
    fake = BatchedFake(reply, tokenizer.get_vocab_size())
    engine = subject.Engine(await fake.start(), str(model), turns)
    frames, calls, loop, tool = Frames(), Calls(promises), asyncio.get_running_loop(), subject.calculate

    async def calculate(expression: str) -> str:
        frames.waiting_for_tool(loop)
        return await tool(expression)

    calculate.__doc__ = tool.__doc__
    few, many = EPISODES
    calls.start()
    try:
        fake.before_answers, subject.calculate = frames.waiting_for_reply, calculate
        await engine.run(BATCH, BATCH)
        fake.before_answers, subject.calculate = (lambda: None), tool
        marks = [(*calls.snapshot(), guard.snapshot())]
        await engine.run(few, BATCH, live=2 * BATCH)
        marks.append((*calls.snapshot(), guard.snapshot()))
        await engine.run(many, BATCH, live=2 * BATCH)
        marks.append((*calls.snapshot(), guard.snapshot()))
    finally:
        calls.stop()
        subject.calculate = tool
        engine.close()
    python, c = (_less(_less(marks[2][at], marks[1][at]), _less(marks[1][at], marks[0][at])) for at in (0, 1))
    guarded = [(marks[2][2][at] - 2 * marks[1][2][at] + marks[0][2][at]) / ((many - few) * turns) for at in (0, 1)]
    return _turn(python, c, frames, (guarded[0], guarded[1]), (many - few) * turns, episodes=many - few)


def _less(more: Counter[Any], less: Counter[Any]) -> Counter[Any]:
    return Counter({key: count - less[key] for key, count in more.items()})


def _turn(
    python: Counter[Any], c: Counter[Any], frames: Frames, guard: tuple[float, float], turns: int, *, episodes: int
) -> Turn:
    by_function: Counter[CodeType] = Counter()
    promises: dict[str, list[float]] = {}
    for (code, promise), count in python.items():
        by_function[code] += count
        promises.setdefault(promise, [0.0, 0.0])[0] += count / turns
    for promise, count in c.items():
        promises.setdefault(promise, [0.0, 0.0])[1] += count / turns
    paths: dict[str, int] = {}
    for code, count in by_function.items():
        if count >= episodes / 2 and (path := _in_engine(code.co_filename)):
            paths[path] = max(paths.get(path, 0), count)
    return Turn(
        python.total() / turns,
        c.total() / turns,
        sum(count > turns / 2 for count in by_function.values()),
        (frames.reply, frames.tool),
        sum(by_function[code] for code in frames.codes) / turns,
        guard,
        {name: (pair[0], pair[1]) for name, pair in promises.items()},
        sorted(path for path, count in paths.items() if count >= turns / 2),
        sorted(path for path, count in paths.items() if count < turns / 2),
    )


def figures(name: str, turn: Turn) -> dict[str, float]:
    """The counts of a workload by the names that size.txt has them under."""
    counts = {
        f"{name} turn, Python calls": round(turn.python),
        f"{name} turn, C calls": round(turn.c),
        f"{name} turn, functions": turn.functions,
        f"{name} turn, frames": max(turn.frames),
        f"{name} turn, resumptions": round(turn.resumed, 1),
    }
    if name == "plain" and turn.guard[0]:
        counts |= {"guard, Python calls a turn": round(turn.guard[0]), "guard, C calls a turn": round(turn.guard[1])}
    return counts


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--turns", type=int, nargs="+", default=[16])
    parser.add_argument("--promises", action="store_true", help="calls by what they are for")
    parser.add_argument("--files", action="store_true", help="files of the engine that an episode runs")
    parser.add_argument("--check", action="store_true", help="fails where a count rose by more than 2 %%")
    parser.add_argument("--record", action="store_true", help="writes the counts at 16 turns that fell")
    parser.add_argument("--allow", nargs=2, action="append", default=[], metavar=("NAME", "REASON"))
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    counts: dict[str, float | None] = {}
    with tempfile.TemporaryDirectory() as folder:
        model, guard = unpack("qwen3", Path(folder)), GuardCalls(Path(folder))
        print("workload  turns   python       c  functions  frames  resumed   guard: python       c")
        for name, turns in product(options.workloads, options.turns):
            turn = asyncio.run(measure(guard, model, WORKLOADS[name], turns, promises=options.promises))
            if turns == 16:
                counts |= figures(name, turn)
            print(
                f"{name:<9} {turns:5d} {turn.python:8.0f} {turn.c:7.0f} {turn.functions:10d} "
                f"{'/'.join(map(str, turn.frames)):>7} {turn.resumed:8.1f} {turn.guard[0]:15.1f} {turn.guard[1]:7.1f}",
                flush=True,
            )
            _print_details(turn, promises=options.promises, files=options.files)
    path = ROOT / "size.txt"
    if options.record:
        return size.write_changes(counts, path, dict(options.allow))
    if options.check and (risen := size.grown(counts, size.read_record(path))):
        print("\nMore than 2 % above size.txt:", *risen, sep="\n  ")
        return 1
    return 0


def _print_details(turn: Turn, *, promises: bool, files: bool) -> None:
    if promises:
        for promise, (python, c) in sorted(turn.promises.items(), key=lambda item: -item[1][0]):
            if python >= 0.1 or c >= 0.1:
                print(f"    {promise:44} {python:7.1f} {c:7.1f}")
    if files:
        for path in turn.repeated:
            print(f"    each turn  {path}")
        for path in turn.once:
            print(f"    once       {path}")


if __name__ == "__main__":
    sys.exit(main())
