"""Windows of images: how many rows an episode makes, which images stand in each, and that each row is exact."""

from __future__ import annotations

from base64 import b64decode
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import trajectories_of
from ended_runs import Ran
from journals import write_entries
from slow_cases import slow_but
from test_condensing import sampled
from test_policy_vision import open_policy
from test_positions import by_the_definition
from trainings import metric_lines
from typer.testing import CliRunner
from vision_code import MACHINE, Screens

from engine.backends.registry import open_backend
from engine.cli.main import app
from engine.plugins.local.vision import VisionModel, place_images
from engine.plugins.show.episode_report import in_words
from engine.runner.replay import Replayer
from engine.runner.runner import Runner
from engine.spec.tasks import load_tasks
from engine.store import RunHeader, RunStore
from engine.store.rows.export import training_rows
from engine.tokens.images import digest_of
from engine.tokens.loading import load_format
from engine.train.packed_model import vision_inputs
from engine.train.packing import pack_rows
from engine.train.verify import recompute


def window(
    count: int, keep: dict[str, Any], *, role: str = "user", opening: bool = True, **limits: Any
) -> dict[str, Any]:
    """What a spec adds for an episode of `count` screens with this window."""
    return {
        "environment": {"use": "vision_code:Screens", "with": {"count": count, "role": role}},
        "machine": MACHINE,
        "condense": {"keep": keep, "opening": opening},
        "limits": {"turn_tokens": 5, "assistant_turns": 40, "on_overflow": "condense"} | limits,
    }


def digests(count: int) -> list[str]:
    """The screens of an episode, in order."""
    screens = [Screens(count).screen(number).image for number in range(count)]
    return [digest_of(b64decode(uri.partition(",")[2])) for uri in screens]


def shown(ran: Ran, count: int) -> list[list[int | str]]:
    """By row: the numbers of its screens; the digest of an image that is none of them."""
    numbers: dict[str, int | str] = {digest: number for number, digest in enumerate(digests(count))}
    return [[numbers.get(image.image, image.image) for image in branch.images] for branch in ran.only.branches]


def check_once(ran: Ran) -> None:
    """Each turn is in one row, and its sampled tokens are trained there and nowhere else."""
    trajectory = ran.only
    assert trajectory.outcome.failure is None, trajectory.outcome.failure
    turns = sampled(trajectory)
    journal = [entry.record for entry in ran.store.journal("a/0")]
    replies = [record.generation.output_ids.tolist() for record in journal if record.kind == "generation"]  # type: ignore[attr-defined]
    assert [turns[turn] for turn in range(len(trajectory.turns))] == replies


@pytest.mark.parametrize(
    ("count", "keep", "rows"),
    [
        (9, {"images": "last 2", "step": 3}, [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8]]),
        (9, {"images": "last 3"}, [[0, 1, 2, 3, 4], [3, 4, 5, 6, 7], [6, 7, 8]]),  # a step of 3
        (6, {"images": "last 2", "step": 1}, [[0, 1], [1, 2], [2, 3], [3, 4], [4, 5]]),
        (6, {"images": "last 1"}, [[0], [1], [2], [3], [4], [5]]),
        (3, {"images": "last 2"}, [[0, 1, 2]]),
        (4, {"images": "last 2"}, [[0, 1, 2], [2, 3]]),
    ],
)
async def test_screens_make_a_row_for_each_step_of_the_window(
    make_spec: Any, run_spec: Any, count: int, keep: dict[str, Any], rows: list[list[int]]
) -> None:
    ran = await run_spec(make_spec("qwen2_5_vl", ["Red."] * count, **window(count, keep, condensations=40)))
    check_once(ran)
    assert shown(ran, count) == rows
    images = int(keep["images"].removeprefix("last "))
    assert len(rows) == (count - images) // keep.get("step", images) + 1
    assert len(ran.only.turns) == count
    for branch in ran.only.branches[1:]:
        assert branch.reason.startswith(f"condensed: {keep.get('step', images)} image")
        assert "[image left out]" in ran.template.decode(branch.input_ids)


async def test_the_prompts_images_stay_unless_opening_is_set(make_spec: Any, run_spec: Any) -> None:
    """And images of tool results are counted as those of a user."""
    changes = window(6, {"images": "last 1", "step": 2}, role="tool", opening=False)
    ran = await run_spec(make_spec("qwen2_5_vl", ["Red."] * 6, **changes))
    check_once(ran)
    assert shown(ran, 6) == [[0, 1, 2], [0, 3, 4], [0, 5]]


async def test_nothing_stands_for_an_image(make_spec: Any, run_spec: Any) -> None:
    """The message stays, also without content: a tool's result belongs to its call."""
    changes = window(3, {"images": "last 1", "older": "nothing"}, role="tool")
    ran = await run_spec(make_spec("qwen2_5_vl", ["Red."] * 3, **changes))
    check_once(ran)
    assert shown(ran, 3) == [[0], [1], [2]]
    texts = [[item if isinstance(item, int) else item.text for item in each.thread] for each in ran.only.condensations]
    assert texts == [["What colour is it?", 1, 2], ["What colour is it?", 1, "", 3, 4]]
    assert all(each.after < each.before for each in ran.only.condensations)
    assert ran.template.decode(ran.only.branches[2].input_ids).count("<|vision_start|>") == 1


async def test_thumbnails_are_stored_shown_and_not_counted(make_spec: Any, run_spec: Any) -> None:
    keep = {"images": "last 1", "step": 2, "older": "thumbnail", "pixels": 60 * 60}
    changes = window(5, keep)
    changes["environment"]["with"]["side"] = 112
    ran = await run_spec(make_spec("qwen2_5_vl", ["Red."] * 5, **changes))
    check_once(ran)
    first, second, third = ran.only.branches
    assert [len(branch.images) for branch in ran.only.branches] == [2, 4, 5]
    sizes = [ran.store.image(image.image) for image in third.images]
    assert [(image.width, image.height) for image in sizes] == [(60, 60), (67, 53), (73, 48), (53, 67), (140, 140)]
    assert all(image.width * image.height <= 3600 for image in sizes[:4])
    assert [list(image.grid) for image in first.images] == [[1, 8, 8], [1, 8, 10]]
    assert {tuple(image.grid) for image in third.images[:4]} == {(1, 4, 4), (1, 4, 6)}
    assert [image.image for image in third.images[:2]] == [image.image for image in second.images[:2]]  # made once
    await replayed(ran)


async def replayed(ran: Ran) -> None:
    """A replay by a format that has seen no image gives the same bytes."""
    replayer = Replayer(ran.loaded, load_format(ran.loaded.spec.model, ran.loaded.base), ran.store)
    found = await replayer.check(ran.only, load_tasks(ran.loaded)[0])
    replayer.close()
    assert found.difference is None


@pytest.mark.parametrize("older", slow_but(["text", "thumbnail"], "text"))
async def test_a_resume_after_a_window_slid_gives_the_same_rows(
    make_spec: Any, run_spec: Any, tmp_path: Path, older: str
) -> None:
    changes = window(
        5, {"images": "last 1", "step": 2, "older": older} | ({"pixels": 3136} if older == "thumbnail" else {})
    )
    ran = await run_spec(make_spec("qwen2_5_vl", **changes))
    await replayed(ran)
    journal = ran.store.journal("a/0")
    slid = next(at for at, entry in enumerate(journal) if entry.record.kind == "condense")
    assert in_words(journal[slid - 1].record) == "3 images: older ones are condensed"
    assert in_words(journal[slid].record).startswith("older images, ")
    store = RunStore.create(tmp_path / "broken", RunHeader.of(ran.loaded))
    for digest in ran.store.image_digests():
        await store.put_image(ran.store.image(digest).data)
    begun = await store.begin(load_tasks(ran.loaded)[0], 0)
    for entry in journal[: slid + 1]:
        await write_entries(begun, entry)
    store.close()
    store = RunStore.open(store.folder)
    form = load_format(ran.loaded.spec.model, ran.loaded.base)
    backend = open_backend(ran.loaded, form)
    await backend.start()
    try:
        await Runner(ran.loaded, load_tasks(ran.loaded), form, backend, store).run()
        (resumed,) = store.trajectories()
    finally:
        await backend.close()
        store.close()
    assert resumed.condensations == ran.only.condensations
    for branch, wanted in zip(resumed.branches, ran.only.branches, strict=True):
        assert branch.images == wanted.images
        np.testing.assert_array_equal(branch.input_ids, wanted.input_ids)


@pytest.mark.parametrize("family", slow_but(["qwen2_5_vl", "qwen3_vl", "smolvlm"], "qwen2_5_vl"))
async def test_log_probs_and_positions_right_after_an_image_is_gone(
    make_spec: Any, run_spec: Any, vlm: Any, family: str
) -> None:
    """The sampler's log-probs are those of a forward pass over each row, whose positions begin anew with its own images."""
    changes = window(7, {"images": "last 2", "older": "nothing"})
    ran = await run_spec(make_spec(family, **changes))
    check_once(ran)
    assert shown(ran, 7) == [[0, 1, 2], [2, 3, 4], [4, 5, 6]]
    rows, vision = list(training_rows(ran.store)), ran.vision
    policy = open_policy(vlm(family), vision)
    found = recompute(policy, rows, 8192)
    assert found.tokens == sum(len(row.places) for row in rows) == ran.only.counts["sampled_tokens"]
    assert found.largest < 1e-5
    (pack,) = pack_rows(rows, 100_000, share_prefixes=True)
    with vision_inputs(policy.net.model, vision, pack, torch.device("cpu"), torch.float32) as inputs:
        packed = inputs.get("position_ids")
    if family == "smolvlm":  # its positions are the places
        return
    assert packed is not None
    backend = VisionModel(vlm(family), torch.device("cpu"), torch.float32, 2, vision=vision)
    for number, row in enumerate(rows):
        wanted = by_the_definition(row, vision.placeholder_id, vision.processing.processor.image_processor.merge_size)
        places = pack.row_tokens(number)
        np.testing.assert_array_equal(packed.reshape(-1, pack.tokens)[:, places].numpy(), wanted[:, : len(places)])
        placed = place_images(
            vision,
            row.branch.input_ids,
            [image.image for image in row.branch.images],
            [(image.start, image.end) for image in row.branch.images],
            {},
        )
        assert placed is not None
        np.testing.assert_array_equal(backend.positions(placed).reshape(wanted.shape).numpy(), wanted)


async def test_a_prompt_without_room_slides_the_window_early(make_spec: Any, run_spec: Any) -> None:
    """The window would have slid at 11 images."""
    changes = window(6, {"images": "last 1", "step": 10, "older": "nothing"}, episode_tokens=140)
    ran = await run_spec(make_spec("qwen2_5_vl", ["Red."] * 6, **changes))
    check_once(ran)
    assert (shown(ran, 6), ran.only.outcome.limit) == ([[0, 1, 2, 3, 4], [5]], None)


@pytest.mark.parametrize(
    ("changes", "rows"),
    [
        ({"limits": {"images": 3}}, [[0, 1, 2], [3, 4, 5]]),
        ({"model": {"max_images": 2}}, [[0, 1], [2, 3], [4, 5]]),
    ],
)
async def test_a_window_slides_before_there_are_too_many_images(
    make_spec: Any, run_spec: Any, changes: dict[str, Any], rows: list[list[int]]
) -> None:
    """The model gets no more images than `limits.images` and `model.max_images`, and the episode goes on."""
    spec = window(6, {"images": "last 1", "step": 9}, **changes.get("limits", {}))
    ran = await run_spec(make_spec("qwen2_5_vl", ["Red."] * 6, model=changes.get("model"), **spec))
    check_once(ran)
    assert shown(ran, 6) == rows
    assert ran.only.outcome.limit is None


async def test_more_images_than_the_model_takes_at_once_fail_their_episode(make_spec: Any, run_spec: Any) -> None:
    """The window keeps two, and the model takes one."""
    changes = window(3, {"images": "last 2"})
    ran = await run_spec(make_spec("qwen2_5_vl", ["Red."] * 3, model={"max_images": 1}, **changes))
    failure = ran.only.outcome.failure
    assert (failure.kind, failure.blame) == ("too_many_images", "environment")


@pytest.mark.slow
def test_a_training_step_over_windows(tmp_path: Path, vlm: Any) -> None:
    """Six squares in three rows of two: the step trains each sampled token once, with the sampler's log-probs."""
    spec = Path(__file__).parents[3] / "specs/train_color_square.yaml"
    settings = [
        f"model.path={vlm('qwen2_5_vl')}",
        "backend.device=cpu",
        "tasks.with={count: 4, turns: 6}",
        "limits={assistant_turns: 6, user_turns: 6, turn_tokens: 4, episode_tokens: null, on_overflow: condense}",
        "condense={keep: {images: last 1, step: 2}, opening: true}",
        "rewards.scorer={use: 'code_for_vision_trainings:vowels'}",
        "train={steps: 1, tasks_per_step: 2, device: cpu, precision: float32, eval: null, dynamic_sampling: false, colocate: false}",
        "rollout={samples_per_task: 4, concurrency: 8}",
    ]
    arguments = ["train", str(spec), "--quiet", "--out", str(tmp_path), "--run-name", "one"]
    result = CliRunner().invoke(app, arguments + [part for setting in settings for part in ("--set", setting)])
    assert result.exit_code == 0, result.output
    (line,) = metric_lines(tmp_path / "one")
    episodes = trajectories_of(tmp_path / "one/rollouts")
    assert line["episodes/count"] == len(episodes) == 8
    assert [[len(branch.images) for branch in episode.branches] for episode in episodes] == [[2, 2, 2]] * 8
    assert line["tokens/trained"] == sum(episode.counts["sampled_tokens"] for episode in episodes)
    assert line["sampler/diff_max"] < 1e-5
    assert line["grad_norm"] > 0
