"""Whole episodes with images: on the tape, in the store, to a model and into training rows."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import vision_kit
from damaged_rows import assert_refused, damaged_row
from installed_commands import needs_command
from journals import write_entries
from recompute import apart
from slow_cases import slow_but, slow_but_each
from vision_code import FIRST, MACHINE, SECOND, THIRD

from engine.api.runs import Run
from engine.runner.replay import Replayer
from engine.schemas.message import ImagePart
from engine.spec.tasks import load_tasks
from engine.store.loader import beside, collate, images_folder, read_rows, vision_of
from engine.store.rows.export import export_rows
from engine.tokens.images import digest_of

LOOK = {"tool_calls": [{"name": "look", "arguments": {"where": "left"}}]}
GALLERY = {"environment": {"use": "vision_code:Gallery"}, "machine": MACHINE}
SCRIPTED = {
    "environment": {"use": "vision_code:Gallery"},
    "tools": [{"use": "vision_code:look"}],
    "user": {"use": "vision_code:Shower"},
    "machine": "tools_and_user",
    "limits": {"turn_tokens": 64},
}
ALL = [digest_of(data) for data in (FIRST, SECOND, THIRD, FIRST)]


async def test_images_in_the_prompt_a_tools_result_and_a_user_turn(make_spec: Any, run_spec: Any) -> None:
    ran = await run_spec(make_spec("qwen3_vl", ["I look.", "It is red."], **SCRIPTED))
    assert ran.only.outcome.failure is None
    ran = await run_spec(make_spec("qwen3_vl", [LOOK, LOOK, "It is red.", "It is green."], **SCRIPTED))
    trajectory = ran.only
    assert trajectory.outcome.failure is None
    assert [event for _, event, _ in trajectory.path] == [
        "ready", "tool_calls", "results", "tool_calls", "results", "answered", "feedback", "answered", "satisfied",
    ]  # fmt: skip
    (branch,) = trajectory.branches
    wanted = [digest_of(data) for data in (FIRST, SECOND, SECOND, THIRD, FIRST)]
    assert [image.image for image in branch.images] == wanted
    assert trajectory.counts["images"] == 5
    bank = ran.vision.bank
    assert (bank.looked, bank.processed) == (
        3,
        0,
    )  # once each, however many turns hold it; no pixels for a scripted model
    pads = branch.input_ids == ran.vision.placeholder_id
    inside = np.zeros(len(pads), bool)
    for image in branch.images:
        t, h, w = image.grid
        assert image.end - image.start == t * h * w // 4
        inside[image.start : image.end] = True
    assert (pads == inside).all()
    assert not (branch.loss_mask[inside] == 1).any()


async def test_the_guard_reads_rows_with_images(make_spec: Any, run_spec: Any) -> None:
    with damaged_row(0) as places:
        ran = await run_spec(make_spec("qwen3_vl", [LOOK, "It is red.", "It is green."], **SCRIPTED))
    assert_refused(ran.only.outcome, places)


async def test_the_store_keeps_each_image_once_and_the_journal_names_it(make_spec: Any, run_spec: Any) -> None:
    ran = await run_spec(make_spec("qwen3_vl", [LOOK, "It is red.", "It is green."], **SCRIPTED))
    stored = {digest: ran.store.image(digest).data for digest in set(ALL)}
    assert stored[digest_of(FIRST)] == FIRST  # bytes as they were handed over
    assert stored[digest_of(THIRD)] == THIRD
    with sqlite3.connect(ran.store.folder / "run.db") as connection:
        assert connection.execute("SELECT count(*) FROM images").fetchone() == (3,)
        texts = [row[0] for row in connection.execute("SELECT payload FROM journal")]
        texts += [row[0] for row in connection.execute("SELECT trajectory FROM trajectories")]
    assert not any("data:" in text for text in texts)
    images = [image for message in ran.only.messages for image in message.images]
    assert images[0] == ImagePart(image=digest_of(FIRST), mime="image/png", width=64, height=64)


async def test_a_replay_gives_the_same_bytes(make_spec: Any, run_spec: Any) -> None:
    from engine.tokens.loading import load_format

    ran = await run_spec(make_spec("qwen2_5_vl", **GALLERY))
    form = load_format(ran.loaded.spec.model, ran.loaded.base)  # another process's: it has seen no image yet
    replayer = Replayer(ran.loaded, form, ran.store)
    found = await replayer.check(ran.only, load_tasks(ran.loaded)[0])
    replayer.close()
    assert found.difference is None


async def test_a_run_that_broke_off_goes_on_with_its_images(make_spec: Any, run_spec: Any, tmp_path: Path) -> None:
    """What the journal holds is enough: the images come out of the run store."""
    from engine.backends.registry import open_backend
    from engine.runner.runner import Runner
    from engine.store import RunHeader, RunStore
    from engine.tokens.loading import load_format

    ran = await run_spec(make_spec("qwen2_5_vl", **GALLERY))
    journal = ran.store.journal("a/0")
    task = load_tasks(ran.loaded)[0]
    store = RunStore.create(tmp_path / "broken", RunHeader.of(ran.loaded))
    for digest in ran.store.image_digests():
        await store.put_image(ran.store.image(digest).data)
    begun = await store.begin(task, 0)
    for entry in journal[:4]:  # reset, a reply, what was shown, a reply
        await write_entries(begun, entry)
    store.close()
    store = RunStore.open(store.folder)
    form = load_format(ran.loaded.spec.model, ran.loaded.base)
    backend = open_backend(ran.loaded, form)
    await backend.start()
    try:
        await Runner(ran.loaded, [task], form, backend, store).run()
        (found,) = store.trajectories()
    finally:
        await backend.close()
        store.close()
    assert found.outcome.failure is None
    wanted = ran.only.branches[0]
    assert found.branches[0].images == wanted.images
    np.testing.assert_array_equal(found.branches[0].input_ids, wanted.input_ids)


@needs_command("replay")
def test_a_fork_holds_the_images_that_it_shares(make_spec: Any, run_spec: Any, tmp_path: Path) -> None:
    import asyncio

    from engine.plugins.replay.command import replay
    from engine.store import RunStore

    ran = asyncio.run(run_spec(make_spec("qwen3_vl", [LOOK, "It is red.", "It is green."], **SCRIPTED)))
    replay(str(ran.store.folder), from_turn=2, salt=1, out=tmp_path / "forks")
    (folder,) = (tmp_path / "forks").iterdir()
    with RunStore.open(folder, readonly=True) as fork:
        (found,) = fork.trajectories()
        assert found.outcome.failure is None
        assert found.branches[0].images == ran.only.branches[0].images
        assert fork.image(digest_of(FIRST)).data == FIRST


@pytest.mark.parametrize("family", slow_but(vision_kit.BUILDERS, "qwen3_vl"))
async def test_log_probs_are_those_of_transformers_over_the_exported_row(
    make_spec: Any, run_spec: Any, vlm: Any, family: str
) -> None:
    rows = [{"id": name} for name in "ab"]
    spec = make_spec(family, tasks={"source": "inline", "rows": rows, "id": "id"}, **GALLERY)
    ran = await run_spec(spec)
    for trajectory in ran.trajectories.values():
        assert trajectory.outcome.failure is None
        assert len(trajectory.turns) == 4
        assert [image.image for image in trajectory.branches[-1].images] == ALL
    assert ran.vision.bank.processed == 3
    # a vision of its own, fed by the run store: what another process has
    off, count, _ = apart(ran.store, vision_of(ran.store), vlm(family))
    assert off < 1e-4
    assert count == sum(trajectory.counts["sampled_tokens"] for trajectory in ran.trajectories.values())


async def test_a_turn_computes_its_new_images_alone(make_spec: Any, run_spec: Any) -> None:
    ran = await run_spec(make_spec("qwen2_5_vl", **GALLERY))
    assert ran.stats["images_computed"] == 4
    length = len(ran.only.branches[0].input_ids) - ran.only.turns[-1].end + ran.only.turns[-1].start
    computed = ran.stats["prompt_tokens_computed"] + ran.stats["prompt_tokens_cached"]
    assert computed == sum(turn.prompt_tokens for turn in ran.only.turns)
    assert ran.only.turns[-1].prompt_tokens == length
    assert ran.stats["prompt_tokens_computed"] < length


async def test_each_branch_holds_exactly_its_images(make_spec: Any, run_spec: Any, tmp_path: Path) -> None:
    (tmp_path / "thinking.jinja").write_text(vision_kit.THINKING_VL)
    replies = [f"<think>\n{why}\n</think>\n\n{said}" for why, said in (("Why though", "Red."), ("And so on", "Green."))]
    changes = SCRIPTED | {"tools": []}
    ran = await run_spec(
        make_spec("qwen3_vl", replies, model={"chat_template": "thinking.jinja", "renderer": "template"}, **changes)
    )
    assert ran.only.outcome.failure is None
    first, second = ran.only.branches
    assert [image.image for image in first.images] == [digest_of(FIRST)]
    assert [image.image for image in second.images] == [digest_of(data) for data in (FIRST, THIRD, FIRST)]
    assert "Why though" in ran.template.decode(first.input_ids)
    assert "Why though" not in ran.template.decode(second.input_ids)
    assert (ran.vision.bank.looked, ran.vision.bank.processed) == (2, 0)
    for branch in (first, second):
        assert int((branch.input_ids == ran.vision.placeholder_id).sum()) == sum(
            image.end - image.start for image in branch.images
        )
    one, two = export_rows(ran.store, vision=ran.vision)
    assert one["image_grid_thw"].tolist() == [[1, 4, 4]]
    assert two["image_grid_thw"].tolist() == [[1, 4, 4], [1, 8, 4], [1, 4, 4]]
    assert [len(row["pixel_values"]) for row in (one, two)] == [16, 64]
    batch = collate([one, two], ran.vision)
    assert batch["image_grid_thw"].shape == (4, 3)
    assert batch["mm_token_type_ids"].sum(dim=1).tolist() == [4, 16]


@pytest.mark.parametrize("format", slow_but(["jsonl", "parquet"], "parquet"))
async def test_a_file_of_rows_has_each_image_once_beside_it(
    make_spec: Any, run_spec: Any, tmp_path: Path, vlm: Any, format: str
) -> None:
    from engine.tokens.loading import load_format

    ran = await run_spec(make_spec("qwen2_5_vl", **GALLERY))
    path = tmp_path / f"out.{format}"
    Run(ran.store).export(path, format=format)
    names = sorted(file.name for file in images_folder(path).iterdir())
    assert names == sorted(f"{digest.removeprefix('sha256:')}.safetensors" for digest in set(ALL))
    fresh = load_format(ran.loaded.spec.model, ran.loaded.base).vision  # without the run
    assert fresh is not None
    found = collate(list(read_rows(path)), beside(fresh, path))
    wanted = collate(list(export_rows(ran.store)), ran.vision)
    assert fresh.bank.processed == 0
    assert found.keys() == wanted.keys()
    for name in wanted:
        np.testing.assert_array_equal(found[name].numpy(), wanted[name].numpy(), err_msg=name)
    assert found["pixel_values"].shape[0] == sum(16 * n for n in (1, 1)) + 24 + 40


async def test_images_of_the_specs_own_prompt(make_spec: Any, run_spec: Any, tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "one.png").write_bytes(FIRST)
    (tmp_path / "two.png").write_bytes(SECOND)
    ran = await run_spec(
        make_spec(
            "qwen3_vl",
            ["It is red."],
            prompt=[
                {
                    "role": "user",
                    "content": [
                        {"type": "image", "image": "pictures/{{file}}.png"},
                        {"type": "image", "image": (tmp_path / "two.png").as_uri()},
                        {"type": "text", "text": "What colour is {{what}}?"},
                    ],
                }
            ],
            tasks={"source": "inline", "rows": [{"id": "a", "file": "one", "what": "it"}], "id": "id"},
            machine="single_turn",
        )
    )
    assert ran.only.outcome.failure is None
    assert [image.image for image in ran.only.branches[0].images] == [digest_of(FIRST), digest_of(SECOND)]
    assert ran.only.messages[0].text == "What colour is it?"
    (entry, *_) = ran.store.journal("a/0")
    assert json.loads(entry.record.json())["prompt"][0]["content"][0]["image"] == digest_of(FIRST)


async def test_a_limit_on_images(make_spec: Any, run_spec: Any) -> None:
    ran = await run_spec(make_spec("qwen2_5_vl", **GALLERY | {"limits": {"turn_tokens": 4, "images": 2}}))
    assert ran.only.outcome.limit == "images"
    assert (len(ran.only.turns), ran.only.counts["images"]) == (2, 4)


async def test_a_guard_may_count_images(make_spec: Any, run_spec: Any) -> None:
    machine = MACHINE | {
        "transitions": [
            {"trigger": "shown", "source": "SHOWING", "dest": "DONE", "conditions": "images.shown >= 2"},
            *MACHINE["transitions"],
        ]
    }
    ran = await run_spec(make_spec("qwen2_5_vl", **GALLERY | {"machine": machine}))
    assert len(ran.only.turns) == 1


@pytest.mark.parametrize(
    ("what", "kind", "words"),
    slow_but_each(
        2,
        [
            ("bytes", "image_unreadable", "bytes cannot be read as an image"),
            ("empty", "image_empty", "an image of no bytes was shown"),
            ("cut", "image_unreadable", "cannot be decoded"),
            ("missing", "image_unreadable", "no such file.png cannot be read"),
            ("url", "image_unreadable", "images are given by path, file:// or data: URI"),
            ("digest", "image_missing", "is not in the run store"),
            ("large", "image_too_large", "an image of 400 x 400 pixels was shown; the spec takes at most 100000"),
            ("thin", "image_refused", "refuses an image of 1 x 400 pixels"),
            ("text", "image_placeholder", "a text contains '<|image_pad|>', which this model reads as an image"),
        ],
        several=True,
    ),
)
@pytest.mark.parametrize("where", ["reset", "user"])
async def test_what_cannot_be_shown_fails_its_episode_alone(
    make_spec: Any, run_spec: Any, tmp_path: Path, what: str, kind: str, words: str, where: str
) -> None:
    bad = {"use": "vision_code:Bad", "with": {"what": what, "folder": str(tmp_path)}}
    changes = SCRIPTED | ({"environment": bad} if where == "reset" else {"user": bad}) | {"tools": []}
    model = {"max_image_pixels": 100_000, "allow_special": what == "text"}
    ran = await run_spec(make_spec("qwen3_vl", ["It is red."], model=model, **changes))
    failure = ran.only.outcome.failure
    assert failure is not None
    assert words in failure.message
    assert (failure.kind, failure.state) == (kind, "PENDING" if where == "reset" else "AWAITING_USER_FEEDBACK")
    assert failure.blame == ("engine" if kind == "image_missing" else "environment" if where == "reset" else "user")
    assert not ran.result.faults


async def test_others_go_on_where_one_episode_shows_what_cannot_be_shown(make_spec: Any, run_spec: Any) -> None:
    rows = [{"id": "a", "image": "no such.png"}, {"id": "b", "image": "fine.png"}]
    content = [{"type": "image", "image": "{{image}}"}, {"type": "text", "text": "What is it?"}]
    path = make_spec(
        "qwen3_vl",
        ["It is red."],
        prompt=[{"role": "user", "content": content}],
        tasks={"source": "inline", "rows": rows, "id": "id"},
        machine="single_turn",
    )
    (path.parent / "fine.png").write_bytes(FIRST)
    ran = await run_spec(path)
    bad, good = ran.trajectories["a/0"].outcome, ran.trajectories["b/0"].outcome
    assert bad.failure is not None
    assert (bad.failure.kind, bad.failure.blame, bad.trainable) == ("image_unreadable", "spec", False)
    assert (good.failure, good.trainable) == (None, True)


async def test_more_images_than_the_model_takes(make_spec: Any, run_spec: Any) -> None:
    ran = await run_spec(make_spec("qwen3_vl", ["It is red."], model={"max_images": 2}, **SCRIPTED | {"tools": []}))
    failure = ran.only.outcome.failure
    assert failure is not None
    assert (failure.kind, failure.blame) == ("too_many_images", "user")
    assert "would hold 3 images; the model takes 2" in failure.message


async def test_a_sampled_placeholder_is_the_policys_failure(make_spec: Any, run_spec: Any) -> None:
    ran = await run_spec(make_spec("qwen3_vl", ["It is <|image_pad|> red."], **SCRIPTED))
    failure = ran.only.outcome.failure
    assert failure is not None
    assert (failure.kind, failure.blame) == ("sampled_placeholder", "policy")
    assert "the model sampled '<|image_pad|>'" in failure.message
    assert ran.only.turns == []


async def test_placeholders_are_never_sampled(make_spec: Any, run_spec: Any, vlm: Any) -> None:
    rows = [{"id": str(number)} for number in range(4)]
    ran = await run_spec(
        make_spec(
            "qwen2_5_vl",
            # as likely as can be, were they not banned
            sampling={"logit_bias": {str(token): 100.0 for token in _banned(vlm("qwen2_5_vl"))}},
            tasks={"source": "inline", "rows": rows, "id": "id"},
            **GALLERY,
        )
    )
    for trajectory in ran.trajectories.values():
        assert trajectory.outcome.failure is None
        (branch,) = trajectory.branches
        assert not np.isin(branch.input_ids[branch.loss_mask == 1], ran.vision.banned).any()


def _banned(folder: Path) -> list[int]:
    from engine.schemas.model import ModelSpec
    from engine.tokens.loading import load_format

    vision = load_format(ModelSpec(path=str(folder)), folder).vision
    assert vision is not None
    return vision.banned


@pytest.mark.parametrize("thinking", [False, True])
async def test_a_reply_that_spells_a_placeholder_stays_what_was_sampled(
    make_spec: Any, run_spec: Any, tmp_path: Path, vlm: Any, thinking: bool
) -> None:
    """Ordinary tokens that read like one are exact on the tape, and plain text where they have to be read again."""
    from engine.schemas.model import ModelSpec
    from engine.tokens.loading import load_format

    form = load_format(ModelSpec(path=str(vlm("qwen3_vl"))), tmp_path)
    why = "<think>\nWhy\n</think>\n\n" if thinking else ""
    spelled = [*form.encode(f"{why}So: <|image"), *form.encode("_pad|>"), form.stop_token_ids[0]]
    (tmp_path / "thinking.jinja").write_text(vision_kit.THINKING_VL)
    model = {"chat_template": "thinking.jinja", "renderer": "template"} if thinking else {}
    replies = [{"tokens": spelled}, "Green."]
    ran = await run_spec(make_spec("qwen3_vl", replies, model=model, **SCRIPTED | {"tools": []}))
    assert ran.only.outcome.failure is None
    assert len(ran.only.branches) == 1 + thinking
    assert ran.only.messages[1].text == "So: <|image_pad|>"
    branch = ran.only.branches[-1]
    newest = branch.input_ids.tolist()
    plain = form.encode(form.fast.quoting.quote("So: <|image_pad|>")) if thinking else spelled[:-1]
    assert any(newest[at : at + len(plain)] == plain for at in range(len(newest)))
    assert form.vision is not None
    assert newest.count(form.vision.placeholder_id) == sum(image.end - image.start for image in branch.images)
