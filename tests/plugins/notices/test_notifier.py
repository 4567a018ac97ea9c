"""Notices to a real server, real commands and a function; none of them can harm a run."""

from __future__ import annotations

import json
import queue
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import structlog

from engine.errors import EngineError
from engine.masking import remember
from engine.plugins.notices.observers import Notifier, Watch
from engine.plugins.notices.spec import NoticeBudget, NotifySpec
from engine.spec.code.entry import EntryError


class Hook:
    """A real HTTP server that keeps what is POSTed, and answers as it is told."""

    def __init__(self) -> None:
        self.events: queue.Queue[dict[str, Any]] = queue.Queue()
        self.status = 204
        self.open = threading.Event()
        self.open.set()
        hook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                hook.events.put(json.loads(body))
                hook.open.wait(30)
                self.send_response(hook.status)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def environ(self) -> dict[str, str]:
        return {"HOOK": f"http://127.0.0.1:{self.server.server_address[1]}/secret"}

    def next(self) -> dict[str, Any]:
        return self.events.get(timeout=120)


@pytest.fixture
def hook() -> Iterator[Hook]:
    made = Hook()
    yield made
    made.open.set()
    made.server.shutdown()
    made.server.server_close()


async def test_a_webhook_gets_the_event_as_json(hook: Hook) -> None:
    notifier = Notifier(NotifySpec(webhook_env="HOOK"), "run-1", "training", environ=hook.environ)
    await notifier.notify("diverged", step=12, reason="the loss is nan", loss=float("nan"), folder=Path("x"))
    event = hook.next()
    assert isinstance(event.pop("time"), float)
    assert event == {
        "kind": "diverged", "run": "run-1", "step": 12, "reason": "the loss is nan", "loss": "NaN", "folder": "x",
        "text": "run-1: training diverged at step 12: the loss is nan",
    }  # fmt: skip


async def test_a_kind_that_is_not_asked_for_is_not_told(hook: Hook) -> None:
    notifier = Notifier(NotifySpec(webhook_env="HOOK", on=["failed"]), "run", environ=hook.environ)
    await notifier.notify("finished")
    await notifier.notify("failed")
    assert hook.next()["kind"] == "failed"
    assert hook.events.empty()


async def test_a_server_that_refuses_is_said_aloud_once(hook: Hook) -> None:
    structlog.reset_defaults()  # a command line that another test called may have set the level above debug
    hook.status = 500
    notifier = Notifier(NotifySpec(webhook_env="HOOK"), "run", environ=hook.environ)
    with structlog.testing.capture_logs() as logs:
        await notifier.notify("failed")
        await notifier.notify("failed")
    assert [(entry["log_level"], entry["reason"]) for entry in logs] == [
        ("warning", "the URL in HOOK replied with 500: "),
        ("debug", "the URL in HOOK replied with 500: "),
    ]


async def test_a_server_that_hangs_is_left_behind_and_its_url_is_not_shown(hook: Hook) -> None:
    hook.open.clear()
    notifier = Notifier(NotifySpec(webhook_env="HOOK"), "run", environ=hook.environ, seconds=0.2)
    with structlog.testing.capture_logs() as logs:
        await notifier.notify("failed")
    assert [entry["reason"] for entry in logs] == ["ReadTimeout at the URL in HOOK"]


async def test_nobody_there_is_no_error() -> None:
    notifier = Notifier(NotifySpec(webhook_env="HOOK"), "run", environ={"HOOK": "http://127.0.0.1:9/"})
    with structlog.testing.capture_logs() as logs:
        await notifier.notify("failed")
    assert [entry["reason"] for entry in logs] == ["ConnectError at the URL in HOOK"]


async def test_a_command_reads_the_event_from_its_standard_input(tmp_path: Path) -> None:
    out = tmp_path / "event.json"
    code = f"import sys; open({str(out)!r}, 'w').write(sys.stdin.read())"
    await Notifier(NotifySpec(command=[sys.executable, "-c", code]), "run").notify("finished", step=3)
    event = json.loads(out.read_text())
    assert (event["kind"], event["step"], event["text"]) == ("finished", 3, "run: run finished at step 3")


async def test_a_command_that_fails_is_told_with_what_it_said() -> None:
    code = "import sys; sys.exit('no such room')"
    notifier = Notifier(NotifySpec(command=[sys.executable, "-c", code]), "run")
    with structlog.testing.capture_logs() as logs:
        await notifier.notify("failed")
    assert [entry["reason"] for entry in logs] == [f"{sys.executable} exited with 1: no such room"]


def ends(pid: int) -> bool:
    """Whether a process is gone, or soon is."""
    for _ in range(200):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


@pytest.mark.slow
async def test_a_command_that_hangs_is_killed_with_what_it_started(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    command = ["sh", "-c", f"sleep 600 & echo $! > {pid}; wait"]
    notifier = Notifier(NotifySpec(command=command), "run", seconds=1.0)
    with structlog.testing.capture_logs() as logs:
        await notifier.notify("failed")
    assert [entry["reason"] for entry in logs] == ["sh did not end within 1 s"]
    assert ends(int(pid.read_text()))


async def test_a_function_is_called_and_may_be_async_and_may_raise(tmp_path: Path) -> None:
    (tmp_path / "tell_somebody.py").write_text(
        "events = []\n"
        "async def later(event):\n    events.append(event['kind'])\n"
        "def never(event):\n    raise SystemExit('out of paper')\n"
    )
    await Notifier(NotifySpec(use="tell_somebody:later"), "run", base=tmp_path).notify("failed")
    assert sys.modules["tell_somebody"].events == ["failed"]
    with structlog.testing.capture_logs() as logs:
        await Notifier(NotifySpec(use="tell_somebody:never"), "run", base=tmp_path).notify("failed")
    assert [entry["reason"] for entry in logs] == ["out of paper"]


async def test_one_way_that_fails_does_not_keep_the_others_from_it(hook: Hook) -> None:
    spec = NotifySpec(webhook_env="HOOK", command=[sys.executable, "-c", "raise SystemExit(1)"])
    await Notifier(spec, "run", environ=hook.environ).notify("failed")
    assert hook.next()["kind"] == "failed"


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (NotifySpec(webhook_env="NO_HOOK"), r"NO_HOOK \(notify.webhook_env\) is not set"),
        (NotifySpec(command=["no-such-command"]), "there is no command 'no-such-command'"),
        (NotifySpec(command=[]), "there is no command ''"),
    ],
)
def test_a_way_that_cannot_work_is_an_error_at_the_start(spec: NotifySpec, said: str) -> None:
    with pytest.raises(EngineError, match=said) as caught:
        Notifier(spec, "run", environ={})
    assert caught.value.kind == "notice_setup"


def test_a_function_that_is_not_there_is_an_error_at_the_start() -> None:
    with pytest.raises(EntryError):
        Notifier(NotifySpec(use="json:no_such"), "run")


def stalling(seconds: float) -> NotifySpec:
    return NotifySpec(webhook_env="HOOK", stall_timeout=seconds)


def test_a_stall_is_told_once_until_something_happens(hook: Hook) -> None:
    now = [0.0]
    spec = stalling(60.0)
    notifier = Notifier(spec.model_copy(update={"repeat_after": 0.0}), "run", "training", environ=hook.environ)
    watch = Watch(notifier, spec, lambda: {"step": 4}, clock=lambda: now[0])
    now[0] = 45.0
    assert watch.check() == 15.0
    now[0] = 61.0
    assert watch.check() == 60.0
    now[0] = 200.0
    watch.check()
    event = hook.next()
    assert (event["kind"], event["step"], event["seconds"]) == ("stalled", 4, 61.0)
    assert event["text"] == "run: training stalled at step 4: no episode and no step for 61 s"
    assert hook.events.empty()
    watch.tick()
    now[0] = 261.0
    watch.check()
    assert hook.next()["seconds"] == 61.0


def test_a_change_of_the_progress_value_is_progress(hook: Hook) -> None:
    now, tokens = [0.0], [0]
    spec = stalling(60.0)
    notifier = Notifier(spec, "run", environ=hook.environ)
    watch = Watch(notifier, spec, progress=lambda: tokens[0], waits_for="no reply", clock=lambda: now[0])
    assert watch.check() == 15.0
    now[0], tokens[0] = 59.0, 7
    assert watch.check() == 15.0
    now[0] = 118.0
    assert watch.check() == 1.0
    assert hook.events.empty()
    now[0] = 119.0
    watch.check()
    assert hook.next()["text"] == "run: run stalled: no reply for 60 s"


def test_each_amount_of_a_budget_is_told_once(hook: Hook) -> None:
    now, tokens = [0.0], [99]
    spec = NotifySpec(webhook_env="HOOK", budget=NoticeBudget(tokens=100, time=3600.0))
    notifier = Notifier(spec, "run", environ=hook.environ)
    watch = Watch(notifier, spec, tokens=lambda: tokens[0], clock=lambda: now[0])
    assert watch.check_budget()
    assert hook.events.empty()
    tokens[0] = 130
    assert watch.check_budget()
    event = hook.next()
    assert (event["kind"], event["tokens"]) == ("budget", 130)
    assert event["text"] == "run: run reached a budget: 130 of 100 tokens are used"
    now[0] = 3600.0
    assert not watch.check_budget()
    assert hook.next()["text"] == "run: run reached a budget: 3600 of 3600 seconds are used"
    watch.check_budget()
    assert hook.events.empty()


def test_the_watch_tells_by_itself_even_when_its_facts_cannot_be_had(hook: Hook) -> None:
    notifier = Notifier(stalling(0.05), "run", environ=hook.environ)
    with Watch(notifier, stalling(0.05), lambda: {"step": 1 // 0}):
        event = hook.next()
    assert event["kind"] == "stalled"
    assert event["problem"] == "ZeroDivisionError('integer division or modulo by zero')"


async def test_a_notice_is_not_repeated_by_this_launch_or_the_next_one(hook: Hook, tmp_path: Path) -> None:
    now = [1000.0]

    def launched() -> Notifier:
        spec = NotifySpec(webhook_env="HOOK", repeat_after=3600.0)
        return Notifier(spec, "run", folder=tmp_path, environ=hook.environ, clock=lambda: now[0])

    first = launched()
    await first.notify("failed", reason="port 4001 refused the connection")
    await first.notify("failed", reason="port 4002 refused the connection")
    assert hook.next()["reason"] == "port 4001 refused the connection"
    (tmp_path / "notices.jsonl").open("a").write('{"at": "torn\n')
    now[0] += 3599
    await launched().notify("failed", reason="port 4003 refused the connection")
    assert hook.events.empty()
    await launched().notify("failed", reason="the disk is full")
    assert hook.next()["reason"] == "the disk is full"
    now[0] += 1
    await launched().notify("failed", reason="port 4004 refused the connection")
    assert hook.next()["reason"] == "port 4004 refused the connection"


async def test_a_notice_that_nobody_received_is_sent_again(hook: Hook, tmp_path: Path) -> None:
    hook.status = 500
    notifier = Notifier(NotifySpec(webhook_env="HOOK"), "run", folder=tmp_path, environ=hook.environ)
    await notifier.notify("failed", reason="x")
    hook.status = 200
    await notifier.notify("failed", reason="x")
    await notifier.notify("failed", reason="x")
    assert [hook.next()["reason"], hook.next()["reason"]] == ["x", "x"]
    assert hook.events.empty()


async def test_a_folder_that_cannot_be_written_does_no_harm(hook: Hook, tmp_path: Path) -> None:
    notifier = Notifier(NotifySpec(webhook_env="HOOK"), "run", folder=tmp_path / "gone", environ=hook.environ)
    await notifier.notify("failed", reason="x")
    assert hook.next()["reason"] == "x"


async def test_no_notice_holds_a_secret(hook: Hook) -> None:
    remember("SEARCH_KEY", "correct-horse-battery")
    notifier = Notifier(NotifySpec(webhook_env="HOOK"), "run", environ=hook.environ)
    reason = (
        f"GET https://me:hunter22@host refused correct-horse-battery and {hook.environ['HOOK']}, Bearer abcdefghijkl"
    )
    await notifier.notify("failed", reason=reason, detail={"sent": ["correct-horse-battery"]})
    event = hook.next()
    assert event["reason"] == "GET https://me:***@host refused ${SEARCH_KEY} and ${HOOK}, Bearer ***"
    assert event["text"] == f"run: run failed: {event['reason']}"
    assert event["detail"] == {"sent": ["${SEARCH_KEY}"]}
