from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from generate_requests import generate_request
from pydantic import ValidationError

from engine.backends.backend import Backend
from engine.backends.registry import open_backend
from engine.backends.scripted import ScriptedBackend
from engine.errors import BackendError, ContextOverflow, SpecError
from engine.schemas.backend import ScriptedBackendSpec
from engine.schemas.generation import GenerateRequest, SamplingParams
from engine.schemas.message import ToolCall
from engine.schemas.model import ModelSpec
from engine.schemas.script import Script
from engine.spec.load import load_spec
from engine.tokens.loading import load_format
from engine.tokens.template import ChatTemplate

SPEC = """
spec: episode/v1
name: dry
model: {path: MODEL}
backend: {kind: scripted, replies: REPLIES}
tasks: {source: inline, rows: [{id: a}]}
machine: single_turn
"""


@pytest.fixture(scope="module")
def form(tiny_tokenizer_dir: Path) -> ChatTemplate:
    return load_format(ModelSpec(path=str(tiny_tokenizer_dir)), tiny_tokenizer_dir)


def ask(turn: int = 0, episode: str = "sum/0", most: int = 200, **sampling: Any) -> GenerateRequest:
    return generate_request([5, 6, 7], SamplingParams(**sampling), episode=episode, turn=turn, max_new_tokens=most)


def play(form: ChatTemplate, script: Any, **kwargs: Any) -> ScriptedBackend:
    return ScriptedBackend(Script.model_validate(script), form, **kwargs)


async def test_reply_k_answers_turn_k_in_the_real_tokens(form: ChatTemplate) -> None:
    backend = play(form, ["The answer is 42.", "Try again"])
    await backend.start()
    for turn, text in enumerate(["The answer is 42.", "Try again"]):
        reply = await backend.generate(ask(turn))
        ids = [*form.tokenizer.encode(text), 2]
        assert reply.output_ids.tolist() == ids
        assert reply.logprobs.tolist() == np.full(len(ids), -0.1, dtype=np.float32).tolist()
        assert reply.finish.plain() == {"type": "stop", "matched": 2, "message": None}
        assert [span.plain() for span in reply.versions] == [{"version": 0, "start": 0, "end": len(ids)}]
        assert reply.prompt_tokens == 3
    assert backend.stats() == {"requests": 2, "tokens": len(form.encode("The answer is 42.Try again")) + 2, "errors": 0}


def test_it_is_a_backend(form: ChatTemplate) -> None:
    assert isinstance(play(form, ["x"]), Backend)


@pytest.mark.parametrize(("exhausted", "said"), [("cycle", ["a", "b", "a", "b"]), ("last", ["a", "b", "b", "b"])])
async def test_a_script_may_go_on(form: ChatTemplate, exhausted: str, said: list[str]) -> None:
    backend = play(form, {"replies": ["a", "b"], "exhausted": exhausted})
    got = [(await backend.generate(ask(turn))).output_ids[:-1] for turn in range(4)]
    assert [form.decode(ids) for ids in got] == said


async def test_a_script_that_has_run_out_is_an_error(form: ChatTemplate) -> None:
    with pytest.raises(BackendError, match="has 1 replies for episode 'sum/0', and none for its turn 1") as caught:
        await play(form, ["a"]).generate(ask(1))
    assert (caught.value.kind, caught.value.retryable) == ("script_exhausted", False)


async def test_the_first_case_that_names_the_episode_is_taken(form: ChatTemplate) -> None:
    backend = play(
        form,
        {
            "cases": [
                {"task": "sum", "sample": 1, "replies": ["sum one"]},
                {"task": ["sum", "a/b"], "replies": ["sum"]},
                {"task": "sum", "sample": 2, "replies": ["never"]},
            ],
            "replies": ["others"],
        },
    )
    expected = {"sum/0": "sum", "sum/1": "sum one", "sum/2": "sum", "a/b/0": "sum", "x/0": "others", "odd": "others"}
    for episode, text in expected.items():
        reply = await backend.generate(ask(episode=episode))
        assert form.decode(reply.output_ids[:-1]) == text


async def test_a_list_of_cases_is_a_script(form: ChatTemplate) -> None:
    backend = play(form, [{"task": "sum", "replies": ["yes"]}])
    assert form.decode((await backend.generate(ask())).output_ids) == "yes<|im_end|>"
    with pytest.raises(BackendError, match="0 replies for episode 'x/0'"):
        await backend.generate(ask(episode="x/0"))


@pytest.mark.parametrize("tool_calls", ["hermes", "plain"])
async def test_calls_are_written_as_the_format_reads_them(tiny_tokenizer_dir: Path, tool_calls: str) -> None:
    form = load_format(ModelSpec(path=str(tiny_tokenizer_dir), tool_calls=tool_calls), tiny_tokenizer_dir)
    calls = [
        {"name": "add", "arguments": {"a": 1, "b": [2.5, None]}},
        {"name": "say", "arguments": {"what": 'it\'s "on"'}},
    ]
    backend = play(form, [{"text": "Let me see.", "tool_calls": calls}])
    await backend.start()
    ids = (await backend.generate(ask())).output_ids
    assert int(ids[-1]) == 2
    parsed = form.replies.parse(ids, before=ids[:0], turn=0, tools=[])
    assert parsed.content == "Let me see."
    assert [
        {"name": attempt.name, "arguments": attempt.arguments}
        for attempt in parsed.attempts
        if isinstance(attempt, ToolCall)
    ] == calls


async def test_a_call_that_the_format_cannot_hold_is_found_at_the_start(form: ChatTemplate) -> None:
    backend = play(form, [{"tool_calls": [{"name": "say", "arguments": {"what": "</tool_call></call>"}}]}])
    with pytest.raises(BackendError, match=r"the calls \['say'\] cannot be written") as caught:
        await backend.start()
    assert caught.value.kind == "script_error"


async def test_a_reply_ends_where_a_model_would_have_been_stopped(form: ChatTemplate) -> None:
    backend = play(form, ["<answer>42</answer> and more", "fox<|im_end|>dog"])
    cut = await backend.generate(ask(0, stop=["</answer>"]))
    assert form.decode(cut.output_ids).startswith("<answer>42</answer>")
    assert "more" not in form.decode(cut.output_ids)
    assert (cut.finish.type, cut.finish.matched) == ("stop", "</answer>")
    ended = await backend.generate(ask(1, stop=["dog"]))
    assert (form.decode(ended.output_ids), ended.finish.matched) == ("fox<|im_end|>", 2)
    short = await backend.generate(ask(0, most=3))
    assert short.output_ids.tolist() == form.encode("<answer>42</answer> and more")[:3]
    assert short.finish.plain() == {"type": "length", "matched": None, "message": None}


async def test_length_abort_and_bare_tokens(form: ChatTemplate) -> None:
    backend = play(
        form,
        [
            {"text": "The quick", "finish": "length", "logprob": -2.5},
            {"finish": "abort"},
            {"tokens": [9, 10]},
            {"tokens": [9, 2, 11]},
        ],
    )
    cut = await backend.generate(ask(0))
    assert (cut.output_ids.tolist(), cut.finish.type) == (form.encode("The quick"), "length")
    assert set(cut.logprobs.tolist()) == {-2.5}
    aborted = await backend.generate(ask(1))
    assert (len(aborted.output_ids), aborted.finish.type, aborted.finish.message) == (
        0,
        "abort",
        "the script sets `finish: abort`",
    )
    bare = await backend.generate(ask(2))
    assert (bare.output_ids.tolist(), bare.finish.type, bare.finish.matched) == ([9, 10], "stop", None)
    stopped = await backend.generate(ask(3))
    assert (stopped.output_ids.tolist(), stopped.finish.matched) == ([9, 2], 2)


async def test_an_error_is_raised_as_often_as_the_script_says(form: ChatTemplate) -> None:
    backend = play(
        form, [{"text": "ok", "error": "connection reset", "retryable": True, "times": 2}, {"error": "gone"}]
    )
    for _ in range(2):
        with pytest.raises(BackendError, match="connection reset") as caught:
            await backend.generate(ask())
        assert (caught.value.kind, caught.value.retryable) == ("scripted_error", True)
    assert form.decode((await backend.generate(ask())).output_ids) == "ok<|im_end|>"
    backend.release("sum/0")
    with pytest.raises(BackendError, match="connection reset"):
        await backend.generate(ask())
    for _ in range(3):
        with pytest.raises(BackendError, match="gone") as caught:
            await backend.generate(ask(1))
        assert caught.value.retryable is False
    assert backend.stats()["errors"] == 6


async def test_latency_and_delay_add_up(form: ChatTemplate) -> None:
    backend = play(form, [{"text": "late", "delay": "30ms"}], latency=0.02)
    began = time.perf_counter()
    reply = await backend.generate(ask())
    assert time.perf_counter() - began >= 0.05
    assert reply.seconds >= 0.05


async def test_a_prompt_that_fills_the_context_overflows(tiny_tokenizer_dir: Path) -> None:
    form = load_format(ModelSpec(path=str(tiny_tokenizer_dir), context=3), tiny_tokenizer_dir)
    with pytest.raises(ContextOverflow, match="the prompt has 3 tokens; the model attends to 3"):
        await play(form, ["x"]).generate(ask())


@pytest.mark.parametrize(
    "script",
    [
        [],
        [{"text": "a", "tokens": [1]}],
        [{"text": "a", "times": 2}],
        [{"text": "a", "retryable": True}],
        [{"txt": "a"}],
        {"replies": ["a"], "cycle": True},
        [{"task": "a", "replies": []}],
        [{"text": "a", "logprob": 0.5}],
        [{"text": "a", "delay": -1}],
    ],
)
def test_a_script_is_strict(script: Any) -> None:
    with pytest.raises(ValidationError):
        Script.model_validate(script)


async def test_ids_outside_the_vocabulary_are_refused(form: ChatTemplate) -> None:
    with pytest.raises(BackendError, match=f"token {form.vocab_size} is not in the vocabulary"):
        await play(form, [{"tokens": [form.vocab_size]}]).start()


def write_spec(folder: Path, model: Path, replies: str, more: str = "") -> Path:
    path = folder / "spec.yaml"
    path.write_text(SPEC.replace("MODEL", str(model)).replace("REPLIES", replies) + more)
    return path


async def test_a_spec_names_its_script_by_file(tmp_path: Path, tiny_tokenizer_dir: Path, form: ChatTemplate) -> None:
    (tmp_path / "script.yaml").write_text("- yes\n- {text: 'no', finish: length}\n")
    loaded = load_spec(write_spec(tmp_path, tiny_tokenizer_dir, "script.yaml"))
    backend = open_backend(loaded, form)
    assert (backend.declared, backend.declared.exact_ids) == (ScriptedBackendSpec, True)
    assert form.decode((await backend.generate(ask(0))).output_ids) == "yes<|im_end|>"  # YAML 1.2: no boolean
    assert form.decode((await backend.generate(ask(1))).output_ids) == "no"


def test_a_mistake_in_a_script_is_shown_where_it_stands(
    tmp_path: Path, tiny_tokenizer_dir: Path, form: ChatTemplate
) -> None:
    (tmp_path / "script.yaml").write_text("replies:\n  - fine\n  - text: a\n    finsh: length\n")
    loaded = load_spec(write_spec(tmp_path, tiny_tokenizer_dir, "script.yaml"))
    with pytest.raises(SpecError) as caught:
        open_backend(loaded, form)
    origin = caught.value.diagnostics[0].origin
    assert origin is not None
    assert (Path(origin.file).name, origin.line, origin.column) == ("script.yaml", 4, 5)
    assert "finish" in str(caught.value)


def test_a_mistake_in_inline_replies_is_shown_in_the_spec(
    tmp_path: Path, tiny_tokenizer_dir: Path, form: ChatTemplate
) -> None:
    path = write_spec(tmp_path, tiny_tokenizer_dir, "[fine, {text: a, finish: sotp}]")
    with pytest.raises(SpecError) as caught:
        open_backend(load_spec(path), form)
    origin = caught.value.diagnostics[0].origin
    assert origin is not None
    assert (Path(origin.file).name, origin.line) == ("spec.yaml", 5)


def test_what_a_script_cannot_follow_is_refused_at_the_start(
    tmp_path: Path, tiny_tokenizer_dir: Path, form: ChatTemplate
) -> None:
    loaded = load_spec(write_spec(tmp_path, tiny_tokenizer_dir, "[a]", "sampling: {regex: 'a+', json_schema: '{}'}\n"))
    with pytest.raises(BackendError, match=r"does not support `sampling\.json_schema`, `sampling\.regex`") as caught:
        open_backend(loaded, form)
    assert caught.value.kind == "unsupported_parameter"
