"""Trainer and servers on the same GPUs in turn, against a stand-in that ends, as SGLang does, when the order is wrong."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from written_specs import listener_spec, save_spec

from engine.errors import BackendError, TrainError
from engine.schemas.train import TrainSpec
from engine.spec.load import load_spec
from engine.store import training as folders
from engine.store.header import RunHeader
from engine.tokens.loading import load_format
from engine.tokens.template import ChatTemplate
from engine.train.learner import Learner
from engine.train.metrics import read_metrics
from engine.train.trainer import Trainer

sys.path.insert(0, str(Path(__file__).parents[3] / "bench"))

from fake_sglang import Call, FakeSGLang
from sglang_cluster import OUTPUT

LOADS = ("/update_weights_from_disk", "/load_lora_adapter")


class StrictServer(FakeSGLang):
    """Ends at a call that SGLang answers with an assertion, or with a fault of the GPU."""

    def __init__(self) -> None:
        super().__init__(output=OUTPUT)
        self.saver = True
        self.started = 1.0
        self.released: list[str] = []
        self.wrong: list[str] = []
        self.order: list[str] = []
        self.refuse: str | None = None
        """Path that is answered 500, once."""
        self.samples = 0

    def restart(self) -> None:
        """As a new process at the same address."""
        self.started += 1
        self.released = []
        self.weight_version = "default"

    def _end(self, why: str) -> tuple[int, Any]:
        self.wrong.append(why)
        return 500, {"error": {"message": why}}

    async def _generate(self, call: Call) -> None:
        if self.released:
            self.wrong.append(f"a request while {self.released} were released")
        self.samples += 1
        await super()._generate(call)

    def _other(self, path: str, body: bytes) -> tuple[int, Any]:
        if path == self.refuse:
            self.refuse = None
            return 500, {"error": {"message": "CUDA out of memory"}}
        if path == "/health" and self.released:
            self._end(f"a health check, which samples a token, while {self.released} were released")
        if path == "/server_info":
            status, told = super()._other(path, body)
            return status, told | {"enable_memory_saver": self.saver, "startup_time": self.started, "random_seed": 7}
        if path == "/release_memory_occupation":
            tags = json.loads(body)["tags"]
            self.order.append(f"release {' '.join(tags)}")
            if self.running or self.released:
                return self._end(f"released with {len(self.running)} requests and {self.released} released")
            self.released = list(tags)
            return 200, None
        if path == "/resume_memory_occupation":
            for tag in json.loads(body)["tags"]:
                self.order.append(f"resume {tag}")
                if tag not in self.released:
                    return self._end(f"resumed {tag}, which was not released")
                if tag == "kv_cache" and "weights" in self.released:
                    return self._end("resumed kv_cache before weights")
                self.released.remove(tag)
            return 200, None
        if path in LOADS:
            self.order.append("load")
            if "weights" in self.released:
                return self._end("loaded weights into memory that was released")
        return super()._other(path, body)


@asynccontextmanager
async def served(form: ChatTemplate, count: int = 1) -> AsyncIterator[tuple[list[StrictServer], list[str]]]:
    async with AsyncExitStack() as stack:
        servers = [StrictServer() for _ in range(count)]
        for server in servers:
            server.tokenize = form.encode
            stack.push_async_callback(server.stop)
        yield servers, [await server.start() for server in servers]


@pytest.fixture(autouse=True)
def _spec_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "core/train"))


@pytest.fixture
def form(tiny_model_dir: Path) -> ChatTemplate:
    from engine.schemas.model import ModelSpec

    return load_format(ModelSpec(path=str(tiny_model_dir)), tiny_model_dir)


Begin = Callable[..., Trainer]


@pytest.fixture
def begin(tmp_path: Path, tiny_model_dir: Path) -> Begin:
    def make(urls: list[str], folder: Path | None = None, **train: Any) -> Trainer:
        spec = {
            **listener_spec("colocated", tiny_model_dir),
            "backend": {"kind": "sglang", "urls": urls, "timeout": "20s", "wait": "5s"},
            "limits": {"turn_tokens": 6, "assistant_turns": 2, "episode_tokens": 96},
            "rewards": {"credit": {"method": "turn_return", "baseline": "none", "scale": "none"}},
            "rollout": {"samples_per_task": 2, "seed": 3},
            "train": {"device": "cpu", "steps": 3, "tasks_per_step": 2, "colocate": True, "dynamic_sampling": False,
                      "advantage_norm": "none", "checkpoints": {"every": 100}} | train,
        }  # fmt: skip
        path = save_spec(tmp_path / "colocated.yaml", spec)
        loaded = load_spec(path, [])
        return Trainer(loaded, folder or folders.begin(tmp_path / "runs", RunHeader.of(loaded)))

    return make


STEP = ["release weights kv_cache", "resume weights", "load", "resume kv_cache"]


async def test_each_update_has_the_servers_memory_and_gives_it_back_in_order(form: ChatTemplate, begin: Begin) -> None:
    async with served(form, 2) as (servers, urls):
        trainer = begin(urls)
        result = await trainer.run()
        assert (result.steps, result.faults) == (3, [])
        for server in servers:
            assert server.wrong == []
            assert server.order == ["load", *STEP * 3]  # the first load is that of the start
            assert server.released == []
        assert not (trainer.folder / "servers" / "released.json").exists()
        assert all(line["time/release"] >= 0 for line in read_metrics(trainer.folder) if line["step"])


@pytest.mark.slow
async def test_an_adapter_is_loaded_after_all_memory_is_back(form: ChatTemplate, begin: Begin) -> None:
    async with served(form) as ([server], urls):
        await begin(urls, lora={"rank": 2, "alpha": 4, "target_modules": ["q_proj"]}).run()
        assert server.wrong == []
        loads = ["release weights kv_cache", "resume weights", "resume kv_cache", "load"]
        assert server.order == ["load", *loads * 3]


async def test_an_update_that_fails_leaves_servers_that_can_sample(
    form: ChatTemplate, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    def diverge(*_: Any) -> dict[str, float]:
        raise TrainError("the loss is nan", kind="diverged")

    monkeypatch.setattr(Learner, "step", diverge)
    async with served(form) as ([server], urls):
        with pytest.raises(TrainError, match="the loss is nan"):
            await begin(urls).run()
        assert (server.wrong, server.released) == ([], [])
        assert server.order == ["load", "release weights kv_cache", "resume weights", "resume kv_cache"]


async def test_a_server_that_cannot_release_memory_is_refused_at_the_start(form: ChatTemplate, begin: Begin) -> None:
    async with served(form) as ([server], urls):
        server.saver = False
        with pytest.raises(BackendError, match="start it with --enable-memory-saver"):
            await begin(urls).run()


@pytest.mark.slow
async def test_a_release_that_one_server_refuses_gives_all_servers_their_memory(
    form: ChatTemplate, begin: Begin
) -> None:
    async with served(form, 2) as (servers, urls):
        servers[1].refuse = "/release_memory_occupation"
        with pytest.raises(BackendError, match=r"did not release its memory: .*CUDA out of memory"):
            await begin(urls).run()
        assert [(server.wrong, server.released) for server in servers] == [([], []), ([], [])]


@pytest.mark.slow
async def test_a_resume_that_fails_says_what_to_change(form: ChatTemplate, begin: Begin) -> None:
    async with served(form) as ([server], urls):
        trainer = begin(urls)
        server.refuse = "/resume_memory_occupation"
        with pytest.raises(
            (BackendError, TrainError), match=r"did not take its memory back: .*out of memory.*--mem-fraction-static"
        ):
            await trainer.run()
        assert server.wrong == []
        assert server.released == []  # the end of the training has asked once more


async def test_a_server_that_was_started_again_during_an_update_is_asked_for_nothing(
    form: ChatTemplate, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(form) as ([server], urls):
        step, updates = Learner.step, []

        def restart_at_second(self: Learner, *given: Any) -> dict[str, float]:
            updates.append(server.released[:])
            if len(updates) == 2:
                server.restart()
            return step(self, *given)

        monkeypatch.setattr(Learner, "step", restart_at_second)
        result = await begin(urls).run()
        assert result.steps == 3
        assert server.wrong == []
        assert updates == [["weights", "kv_cache"]] * 3
        assert server.order == ["load", *STEP, STEP[0], "load", *STEP]
        assert server.weight_version == "3"


async def test_memory_that_a_killed_training_had_is_taken_back_before_the_first_request(
    form: ChatTemplate, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        """As SIGKILL: nothing of the process runs after it."""

    async with served(form) as ([server], urls):
        trainer = begin(urls)
        with monkeypatch.context() as patch:
            patch.setattr(Learner, "step", lambda *_: (_ for _ in ()).throw(Killed()))
            patch.setattr("engine.plugins.weights.colocation.ServerMemory.resume", _nothing)
            with pytest.raises((Killed, asyncio.CancelledError)):
                await trainer.run()
        assert server.released == ["weights", "kv_cache"]
        note = trainer.folder / "servers" / "released.json"
        assert list(json.loads(note.read_text())) == urls
        server.order.clear()
        result = await begin(urls, trainer.folder).run()
        assert result.steps == 3
        assert server.wrong == []
        assert server.order == ["resume weights", "resume kv_cache", "load", *STEP * 3]
        assert not note.exists()


async def _nothing(*_: Any) -> None:
    return None


@pytest.mark.slow
async def test_the_memory_of_a_server_that_was_started_again_after_a_kill_is_left_alone(
    form: ChatTemplate, begin: Begin
) -> None:
    async with served(form) as ([server], urls):
        trainer = begin(urls)
        note = trainer.folder / "servers" / "released.json"
        note.parent.mkdir()
        note.write_text(json.dumps({urls[0]: ["0.5 7", ["weights", "kv_cache"]]}))
        await trainer.run()
        assert server.wrong == []
        assert server.order == ["load", *STEP * 3]


@pytest.mark.slow
async def test_a_busy_server_is_waited_for_and_then_an_error(
    form: ChatTemplate, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.plugins.weights.colocation.IDLE_SECONDS", 0.3)
    async with served(form) as ([server], urls):
        server.running["other"] = None  # type: ignore[assignment]
        with pytest.raises(BackendError, match=r"still works on 1 requests .* does another program use it\?"):
            await begin(urls).run()
        assert (server.wrong, server.order) == ([], ["load"])


@pytest.mark.parametrize(
    ("backend", "train", "message"),
    [
        ("{kind: local}", "colocate: true", "the `local` backend has no servers that release memory"),
        ("{kind: sglang, urls: ['http://a'], router: true}", "colocate: true", "a router does not pass on"),
        ("{kind: sglang, urls: ['http://a']}", "colocate: true, asynchrony: {max_staleness: 1}", "servers sample while an update runs"),
        ("{kind: sglang, urls: ['http://a']}", "colocate: true, kind: sft, data: {path: a.jsonl}", "nothing is sampled between updates"),
    ],
)  # fmt: skip
def test_what_cannot_be_colocated_is_found(tmp_path: Path, backend: str, train: str, message: str) -> None:
    from engine.validate import check_spec

    path = tmp_path / "s.yaml"
    path.write_text(
        "spec: episode/v1\nname: a\nmodel: {path: tiny-qwen2}\n"
        f"backend: {backend}\ntasks: {{source: inline, rows: [{{q: a}}]}}\nprompt: [{{role: user, content: '{{{{q}}}}'}}]\n"
        f"rollout: {{samples_per_task: 2}}\ntrain: {{{train}}}\n"
    )
    found = [item for item in check_spec(load_spec(path, [])) if item.rule == "train.colocate"]
    assert [message in item.message for item in found] == [True]


def test_the_default_is_not_to_share_gpus() -> None:
    assert TrainSpec().colocate is False
