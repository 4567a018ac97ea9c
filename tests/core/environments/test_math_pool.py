"""Checking answers costs CPU time up to a limit, whatever is written; waiting for a process costs an answer nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from slow_cases import slow_but

from engine.environments.math_answers import MathPool
from engine.environments.scorers import check_answer

ENDLESS = ["$9^{9^{9^9}}$", "\\boxed{" + "{" * 40 + "12" + "}" * 40 + "}", "$" + "(" * 30 + "1" + ")" * 30 + "$"]
"""One call of SymPy that nothing interrupts, and what the parser takes exponential time for."""


@pytest.fixture(scope="module")
def pool() -> Iterator[MathPool]:
    """One process: the next starts where a test ended it."""
    made = MathPool(most=1)
    yield made
    made.close()


@pytest.mark.slow
@pytest.mark.parametrize("reply", slow_but(ENDLESS, ENDLESS[0]), ids=["power", "braces", "parentheses"])
def test_an_answer_that_takes_for_ever_is_wrong_and_the_next_is_checked(pool: MathPool, reply: str) -> None:
    assert pool.ask("compare", seconds=0.3, gold="5", reply=reply) is None
    assert pool.ask("compare", gold="5", reply="$5$") == {"answer": "5", "right": True}


@pytest.mark.slow
def test_a_loaded_machine_makes_no_answer_wrong() -> None:
    """More busy processes than processors, and hostile answers in the same pool: wall time passes, CPU time does not."""
    spin = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * (os.cpu_count() or 1))]
    pool = MathPool(most=4)
    asked = [(f"{index}", True) for index in range(12)] + [(ENDLESS[0], False)] * 4

    def ask(item: tuple[str, bool]) -> bool:
        text, honest = item
        told = pool.ask("compare", 0.5, gold=text if honest else "5", reply=f"${text}$" if honest else text)
        return told is not None and told["right"]

    try:
        with ThreadPoolExecutor(len(asked)) as threads:
            assert list(threads.map(ask, asked)) == [honest for _, honest in asked]
    finally:
        pool.close()
        for process in spin:
            process.kill()
            process.wait()


@pytest.mark.slow  # by default: an answer that takes for ever, above, whose process is killed too
def test_a_process_that_somebody_kills_costs_no_answer(pool: MathPool) -> None:
    assert pool.ask("read", latex="1/4") == {"value": 0.25}
    [worker] = pool._workers.queue
    assert worker is not None
    os.kill(worker.pid, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(pool.ask, "read", latex="3/4")
        os.kill(worker.pid, signal.SIGKILL)
        assert answer.result() == {"value": 0.75}


@pytest.mark.slow
def test_too_much_memory_is_a_wrong_answer(pool: MathPool) -> None:
    told = pool.ask("compare", seconds=0.5, gold="5", reply="$10^{10^{10}}$")
    assert told is None or told["right"] is False
    assert pool.ask("read", latex="1/4") == {"value": 0.25}


@pytest.mark.slow
def test_the_words_say_that_cpu_time_is_meant() -> None:
    assert check_answer("5", ENDLESS[0], seconds=0.3) == (False, "not checked within 0.3 s of CPU time")
