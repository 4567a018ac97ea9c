"""slime's hooks over episodes of the engine: samples, converter and advantages are the engine's rows, or the training stops."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from slime_kit import (
    Sample,
    arrived,
    assert_same,
    document,
    row_of,
    sampled,
    slime_args,
    stored,
)

from engine.errors import TrainError
from engine.plugins.trainers.slime import advantages, convert, generate, generate_rollout
from engine.plugins.trainers.slime.rollouts import SlimeEpisodes
from engine.plugins.trainers.slime.rows import samples_of


def test_samples_and_columns_are_the_rows(args: Any, router: Any) -> None:
    samples = sampled(args)
    data = convert(args, samples)
    rows = stored(args)
    assert_same(samples, data, rows)
    assert len(rows) == 4
    assert len({float(value) for each in data["rewards"] for value in each}) > 2  # by turn and by episode, and 0.0
    assert [sample.weight_versions for sample in samples] == [["7"]] * 4
    assert data["rollout_ids"] == data["sample_indices"] == [0, 1, 2, 3]
    assert data["rollout_mask_sums"] == [10, 10, 10, 10]
    assert data["raw_reward"] == [sample.reward for sample in samples]
    sent = {tuple(json.loads(call)["input_ids"]) for call in router.calls}
    for sample in samples:  # the second prompt was the tape: the ids as they were sampled
        row = row_of(sample, rows)
        second = int(np.flatnonzero(row["turn_ids"] == 1)[0])
        assert tuple(sample.tokens[:second]) in sent


def test_a_rewritten_history_is_two_samples_of_one_rollout(router: Any, write: Any, rewriting: Path) -> None:
    args = slime_args(router.url, write(rewriting), rollout_function_path="theirs", engine_rows="several")
    try:
        samples = sampled(args)
        data = convert(args, samples)
        assert_same(samples, data, stored(args))
    finally:
        SlimeEpisodes.of(args).stop()
    assert len(samples) == 8
    assert data["rollout_ids"] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert data["rollout_mask_sums"] == [10] * 8
    assert [sum(mask) for mask in data["loss_masks"]] == [5] * 8


def test_one_sample_for_each_episode_is_refused_for_several_rows(router: Any, write: Any, rewriting: Path) -> None:
    args = slime_args(router.url, write(rewriting), rollout_function_path="theirs")
    try:
        with pytest.raises(TrainError, match=r"has 2 rows, .*`engine_rows: several`"):
            sampled(args)
    finally:
        SlimeEpisodes.of(args).stop()


# --- the rollout function, with a stand-in of its two result classes -----------------------------------------------


class Source:
    """A data source of slime: groups of samples with one prompt."""

    def __init__(self, size: int = 2) -> None:
        self.size = size
        self.given: list[int] = []

    def get_samples(self, count: int) -> list[list[Any]]:
        first = sum(self.given)
        self.given.append(count)
        numbers = range(first, first + count)
        return [[Sample(f"prompt-{at % 3}", 2 * at + each, at) for each in range(self.size)] for at in numbers]


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch) -> None:
    base = ModuleType("slime.rollout.base_types")
    base.RolloutFnTrainOutput = base.RolloutFnEvalOutput = SimpleNamespace  # type: ignore[attr-defined]
    for name in ("slime", "slime.rollout"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "slime.rollout.base_types", base)


@pytest.mark.usefixtures("results")
@pytest.mark.parametrize("rows", [1, 2])
def test_a_rollout_is_groups_of_samples_or_of_lists(router: Any, write: Any, rewriting: Path, rows: int) -> None:
    args = slime_args(router.url, write(rewriting) if rows == 2 else write())
    try:
        output = generate_rollout(args, 0, Source())
    finally:
        SlimeEpisodes.of(args).stop()
    assert [len(group) for group in output.samples] == [2, 2]
    flat = [sample for group in output.samples for each in group for sample in (each if rows == 2 else [each])]
    assert_same(flat, convert(args, flat), stored(args))
    assert len(flat) == 4 * rows
    assert output.metrics == {
        "engine/groups_sampled": 2,
        "engine/groups_replaced": 0,
        "engine/groups_without_signal": 0,
        "engine/groups_small": 0,
        "engine/untrained_episodes": 0,
    }


@pytest.mark.usefixtures("results")
def test_groups_without_signal_are_replaced_for_a_number_of_rounds(router: Any, write: Any) -> None:
    train = document(Path())["train"] | {"dynamic_sampling": True, "max_sampling_rounds": 3}
    source = Source()
    args = slime_args(
        router.url,
        write(
            train=train,
            rewards={"credit": {"method": "outcome", "baseline": "mean"}},
            user={"use": "code_for_training:Bored"},
        ),
    )
    try:
        output = generate_rollout(args, 0, source)
    finally:
        SlimeEpisodes.of(args).stop()
    assert source.given == [2, 2, 2]  # every reward is 1
    assert len(output.samples) == 2
    assert output.metrics["engine/groups_replaced"] == 4
    assert output.metrics["engine/groups_without_signal"] == 2


@pytest.mark.usefixtures("results")
@pytest.mark.parametrize("dynamic_sampling", [True, False])
def test_a_group_of_one_episode_is_replaced_or_not_trained(router: Any, write: Any, dynamic_sampling: bool) -> None:
    """The task prompt-0 keeps one of two episodes, whose advantage would be its raw return."""
    train = document(Path())["train"] | {"dynamic_sampling": dynamic_sampling, "max_sampling_rounds": 2}
    args = slime_args(router.url, write(train=train, user={"use": "code_for_training:Fading"}, rewards={}))
    try:
        output = generate_rollout(args, 0, Source())
    finally:
        SlimeEpisodes.of(args).stop()
    assert output.metrics["engine/groups_small"] >= 1
    flat = [sample for group in output.samples for sample in group]
    data = convert(args, flat)
    trained = {sample.prompt: any(mask) for sample, mask in zip(flat, data["loss_masks"], strict=True)}
    assert (
        trained == {"prompt-1": True, "prompt-2": True} if dynamic_sampling else {"prompt-0": False, "prompt-1": True}
    )
    for sample, rewards in zip(flat, data["rewards"], strict=True):
        assert bool(rewards.any()) <= trained[sample.prompt]


@pytest.mark.usefixtures("results")
def test_groups_of_another_size_are_refused(args: Any) -> None:
    with pytest.raises(TrainError, match="is not 2 samples of one task"):
        generate_rollout(args, 0, Source(size=3))


@pytest.mark.usefixtures("megatron")
def test_advantages_reach_the_loss_or_the_training_stops(args: Any) -> None:
    data = convert(args, sampled(args))
    rollout = arrived(data)
    advantages(args, rollout)
    assert "prompt" not in rollout
    for name in ("advantages", "returns"):
        assert all(torch.equal(a, b) for a, b in zip(rollout[name], data["rewards"], strict=True))

    def lost(change: Callable[[dict[str, Any]], Any]) -> None:
        broken = arrived(data)
        change(broken)
        with pytest.raises(TrainError) as caught:
            advantages(args, broken)
        assert caught.value.kind == "handover"

    lost(lambda data: data["rewards"][1].mul_(0.5))
    lost(lambda data: data["loss_masks"][0][0].zero_())
    lost(lambda data: data["tokens"].__setitem__(2, data["tokens"][2][:-1]))
    lost(lambda data: data.update(rewards=[1.0, 2.0, 3.0, 4.0]))
    lost(lambda data: data.pop("prompt"))

    def without_last(data: dict[str, Any]) -> None:
        for column in data.values():
            column.pop()

    lost(without_last)


def test_samples_that_the_converter_cannot_convert(args: Any) -> None:
    samples = sampled(args)
    with pytest.raises(TrainError, match="their number is not a multiple of --global-batch-size 3"):
        convert(SimpleNamespace(**vars(args) | {"global_batch_size": 3}), samples)
    with pytest.raises(TrainError, match=r"samples \[9\] .* were not made by the engine"):
        convert(args, [*samples, Sample(index=9)])
    first = samples[0]
    first.tokens = [*first.tokens[:-1], 3]
    with pytest.raises(TrainError, match="sample 0 has other tokens"):
        convert(args, samples)


def test_a_removed_sample_stays_in_the_baseline_and_is_not_trained(args: Any) -> None:
    samples = sampled(args)
    samples[1].remove_sample = True
    data = convert(args, samples)
    assert data["loss_masks"][1] == [0] * samples[1].response_length
    assert not data["rewards"][1].any()
    assert data["rollout_mask_sums"] == [10, 0, 10, 10]


def test_an_episode_that_the_engine_could_not_finish_is_not_trained(args: Any) -> None:
    (made,) = samples_of(Sample("prompt", 5, 1), None, lambda ids: "", None)
    assert (made.remove_sample, made.loss_mask, made.reward, made.status.value) == (True, [0], 0.0, "failed")
    samples = sampled(args)
    args.global_batch_size = 5
    data = convert(args, [*samples, made])
    assert (data["loss_masks"][4], data["rewards"][4].tolist(), data["rollout_mask_sums"][4]) == ([0], [0.0], 0)


def test_samples_whose_prompts_are_not_the_tasks_of_their_groups(args: Any) -> None:
    def run(*samples: Sample) -> None:
        async def all_of_them() -> None:
            for each in samples:
                await generate(args, each, {})

        asyncio.run(all_of_them())

    with pytest.raises(TrainError, match="'nothing' is not a task of"):
        run(Sample("nothing", 0, 0))
    with pytest.raises(TrainError, match="remove --apply-chat-template"):
        run(Sample([{"role": "user", "content": "prompt"}], 0, 0))
    with pytest.raises(TrainError, match="group 4 has the prompts 'prompt-0' and 'prompt-1'"):
        run(Sample("prompt-0", 0, 4), Sample("prompt-1", 1, 4))
    with pytest.raises(TrainError, match=r"slime asks for temperature 1, and .* samples with 0.3"):
        asyncio.run(generate(args, Sample("prompt", 0, 5), {"temperature": 1.0}))


def test_a_second_use_of_a_task_has_other_episodes(args: Any) -> None:
    sampled(args, groups=1)
    sampled(args, groups=1)  # the same group once more, as after an abort
    again = [Sample("prompt-0", at, 7) for at in range(2)]

    async def run() -> None:
        for each in again:
            await generate(args, each, {})

    asyncio.run(run())
    names = sorted({row["episode_id"] for row in stored(args).values()})
    assert names == ["prompt-0/0", "prompt-0/1", "prompt-0/2", "prompt-0/3", "prompt-0~1/0", "prompt-0~1/1"]


def test_saved_samples_are_converted_as_those_in_memory(args: Any, tmp_path: Path) -> None:
    """`--save-debug-rollout-data` writes samples with torch.save, and `--load-debug-rollout-data` trains on them."""
    samples = sampled(args)
    torch.save([vars(sample) for sample in samples], tmp_path / "saved.pt")
    loaded = [Sample(**each) for each in torch.load(tmp_path / "saved.pt", weights_only=False)]
    before, after = convert(args, samples), convert(args, loaded)
    assert [each.tolist() for each in after.pop("rewards")] == [each.tolist() for each in before.pop("rewards")]
    assert before == after
