"""Profilers, debuggers and `faulthandler` work after each kind of call whose deadline ended, and while it is ended.

Each case runs in a child process with a time limit: what CPython 3.11 does wrong is a loop in C that nothing ends.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

CALLS = '''
import asyncio, threading, time
from engine.actions.calling import interrupt
from engine.actions.calling.code_call import call_spec_code
from engine.actions.calling.workers import Workers
from engine.errors import SpecCodeError

interrupt.TICK = 0.002
interrupt.BUSY_SECONDS = 0.0

async def call(workers, function, seconds, *args):
    try:
        return await call_spec_code(workers, function, *args, seconds=seconds, blame="tool", what="tool `t`")
    except SpecCodeError as error:
        return error.kind

def wait(event): event.wait()          # idle: its thread is never interrupted
def spin():
    while True: pass
def until(when):
    while not when: pass
async def ready(): return 1
async def spin_async(): spin()
def sleeps(began):
    """Is interrupted while it waits in C, where the exception stays pending."""
    began.set()
    time.sleep(0.8)

async def idle(workers):
    event = threading.Event()
    assert await call(workers, wait, 0.01, event) == "tool_timeout"
    event.set()

async def usual(workers):
    assert await call(workers, ready, 60) == 1

async def interrupted(workers):
    assert await call(workers, spin, 0.01) == "tool_timeout"
    while not workers.interrupter.ended: await asyncio.sleep(0.01)

async def interrupted_loop(workers):
    assert await call(workers, spin_async, 0.01) == "tool_timeout"
    while not workers.interrupter.ended: await asyncio.sleep(0.01)

async def withdrawn(workers):
    for _ in range(5):
        when = []
        assert await call(workers, until, 0.003, when) == "tool_timeout"
        when.append(1)
    while workers.interrupter._threads: await asyncio.sleep(0.01)

async def pending(workers):
    began = threading.Event()
    task = asyncio.create_task(call(workers, sleeps, 0.01, began))
    while not workers.interrupter._threads: await asyncio.sleep(0.01)
    (busy,) = workers.interrupter._threads
    while not busy.interruptions: await asyncio.sleep(0.001)
    look()                              # while it is pending
    assert workers.interrupter._threads, "the tool waited for the end of the sleep"
    await task

async def main(kind):
    workers = Workers()
    await globals()[kind](workers)
    workers.close()
'''

TOOLS = {
    "profile": """
import cProfile
def look():
    profile = cProfile.Profile()
    assert profile.runcall(sum, [1, 2]) == 3
    profile.runcall(lambda: (lambda: 1)())
    assert profile.getstats()
""",
    "trace": """
import sys
def look():
    events = []
    def trace(frame, event, value):
        events.append(event)
        return trace
    sys.settrace(trace)
    (lambda: 1)()
    sys.settrace(None)
    assert events[:3] == ["call", "line", "return"], events
""",
    "faulthandler": """
import faulthandler, tempfile
def look():
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file)
        faulthandler.dump_traceback_later(60, file=file)
        faulthandler.cancel_dump_traceback_later()
        assert file.seek(0, 2) > 0
""",
}

KINDS = ["idle", "usual", "interrupted", "interrupted_loop", "withdrawn", "pending"]
QUICK = {("profile", "withdrawn"), ("trace", "pending")}


@pytest.mark.parametrize(
    ("tool", "kind"),
    [
        pytest.param(tool, kind, marks=() if (tool, kind) in QUICK else pytest.mark.slow)
        for tool in TOOLS
        for kind in KINDS
    ],
)
def test_tools_that_look_at_code_do_not_hang(tool: str, kind: str) -> None:
    code = f"{CALLS}{TOOLS[tool]}\nasyncio.run(main({kind!r}))\nlook()\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
