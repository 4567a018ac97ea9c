"""Signals when even the main thread is stuck: the process ends all the same."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
from slow_cases import slow_after

SCRIPT = """
import asyncio, sys, time
from engine.cli import exits

exits.GRACE_SECONDS = float(sys.argv[1])

async def main():
    with exits.stop_on_signals(asyncio.Event(), "To finish it: resume"):
        print("ready", flush=True)
        while True:
            time.sleep(0.05)

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("grace", "signals", "status"),
    slow_after(
        2,
        [
            (0.1, [signal.SIGTERM], 143),
            (600, [signal.SIGINT, signal.SIGINT], 130),
            (600, [signal.SIGTERM, signal.SIGTERM], 143),
            (600, [signal.SIGTERM, signal.SIGINT], 143),
            (600, [signal.SIGINT, signal.SIGTERM, signal.SIGTERM], 143),
            (0.1, [signal.SIGINT, signal.SIGTERM], 143),
        ],
        several=True,
    ),
)
def test_a_blocked_main_thread_does_not_keep_the_process(
    grace: float, signals: list[signal.Signals], status: int
) -> None:
    command = [sys.executable, "-c", SCRIPT, str(grace)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline() == "ready\n"
    for number in signals[:-1]:
        process.send_signal(number)
        assert process.stderr.readline().startswith("Stopping")  # or the next one would be pending with it
    process.send_signal(signals[-1])
    _, err = process.communicate(timeout=60)
    assert process.returncode == status
    assert "Stopped at once. To finish it: resume" in err


def test_the_first_signal_only_asks() -> None:
    script = SCRIPT.replace(
        "while True:\n            time.sleep(0.05)", "await asyncio.sleep(0.5)\n        print('ended')"
    )
    command = [sys.executable, "-c", script, "600"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "ended\n"), err
