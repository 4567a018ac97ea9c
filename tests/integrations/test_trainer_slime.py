"""slime's hooks over episodes of the engine: samples, converter and advantages are the engine's rows, or the training stops."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import vision_kit
import yaml
from slime_kit import Sample, document, slime_args, start_router
from vision_code import MACHINE

from engine.backends.registry import open_backend
from engine.errors import TrainError
from engine.integrations.trainers.check import check_trainer
from engine.integrations.trainers.slime import advantages, convert, generate, generate_rollout
from engine.integrations.trainers.slime.episodes import Episodes
from engine.integrations.trainers.slime.samples import origin_of, samples_of
from engine.integrations.trainers.slime.settings import refuse_arguments
from engine.runner.run import Runner
from engine.spec.load import load_spec
from engine.spec.tasks import load_tasks
from engine.store import RunHeader, RunStore
from engine.store.export import export_rows
from engine.tokens.loading import load_format

WHITELIST = [
    *("tokens", "multimodal_train_inputs", "response_lengths", "rewards", "truncated", "loss_masks", "round_number"),
    *("sample_indices", "rollout_ids", "rollout_mask_sums", "rollout_log_probs", "rollout_top_p_token_ids"),
    *(
        "rollout_top_p_token_offsets",
        "rollout_routed_experts",
        "source_names",
        "prompt",
        "teacher_log_probs",
        "raw_reward",
    ),
]
"""The columns that slime's `_split_train_data_by_dp` forwards (624b824a8, slime/ray/rollout.py)."""


@pytest.fixture
def write(tmp_path: Path, tiny_model_dir: Path) -> Callable[..., Path]:
    def make(model: Path | None = None, **changes: Any) -> Path:
        path = tmp_path / "spec.yaml"
        path.write_text(yaml.safe_dump(document(model or tiny_model_dir, **changes)))
        return path

    return make


@pytest.fixture
def router(tiny_model_dir: Path) -> Iterator[Any]:
    fake, stop = start_router(tiny_model_dir)
    yield fake
    stop()


def sampled(args: Any, groups: int = 2, size: int = 2) -> list[Any]:
    """Samples of one rollout by the generate function, flat as slime gives them to the converter."""
    given = [Sample(f"prompt-{at}", at * size + each, at) for at in range(groups) for each in range(size)]

    async def run() -> list[Any]:
        return await asyncio.gather(*(generate(args, each, {"temperature": 0.3}) for each in given))

    made: list[Any] = asyncio.run(run())
    return [sample for each in made for sample in (each if isinstance(each, list) else [each])]


@pytest.fixture
def args(router: Any, write: Callable[..., Path]) -> Iterator[Any]:
    made = slime_args(router.url, write(), rollout_function_path="slime.rollout.sglang_rollout.generate_rollout")
    yield made
    Episodes.of(made).stop()


def stored(args: Any) -> dict[tuple[int, ...], dict[str, Any]]:
    store = RunStore.open(Path(args.engine_folder) / "rollouts", readonly=True)
    return {(row["task_id"], row["sample_index"], row["branch"]): row for row in export_rows(store)}


def row_of(sample: Any, rows: dict[Any, Any]) -> dict[str, Any]:
    origin = origin_of(sample)
    assert origin is not None
    ended = origin.trajectory
    assert ended is not None
    found: dict[str, Any] = rows[ended.task_id, ended.sample_index, origin.branch]
    return found


def assert_same(samples: list[Any], data: dict[str, Any], rows: dict[Any, Any]) -> None:
    """Samples and converted columns are the stored rows: ids, masks, log-probs, advantages."""
    assert set(data) <= set(WHITELIST)
    assert {len(column) for column in data.values()} == {len(samples)}
    for at, sample in enumerate(samples):
        row = row_of(sample, rows)
        start = len(sample.tokens) - sample.response_length
        assert data["tokens"][at] == row["input_ids"].tolist()
        assert int((row["loss_mask"] == 1).argmax()) == start
        assert data["loss_masks"][at] == row["loss_mask"][start:].tolist()
        assert np.array_equal(np.float32(data["rollout_log_probs"][at]), row["logprobs"][start:])
        assert data["rewards"][at].dtype == torch.float32
        assert np.array_equal(data["rewards"][at].numpy(), row["advantages"][start:])


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


REWRITING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content if m.role != 'assistant' or loop.last else 'said' }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def rewriting(tiny_model_dir: Path, tmp_path: Path) -> Path:
    """A model whose template replaces earlier replies, so that an episode of two turns has two rows."""
    folder = Path(shutil.copytree(tiny_model_dir, tmp_path / "rewriting"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = REWRITING
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(REWRITING)
    return folder


def test_a_rewritten_history_is_two_samples_of_one_rollout(router: Any, write: Any, rewriting: Path) -> None:
    args = slime_args(router.url, write(rewriting), rollout_function_path="theirs", engine_rows="several")
    try:
        samples = sampled(args)
        data = convert(args, samples)
        assert_same(samples, data, stored(args))
    finally:
        Episodes.of(args).stop()
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
        Episodes.of(args).stop()


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
        Episodes.of(args).stop()
    assert [len(group) for group in output.samples] == [2, 2]
    flat = [sample for group in output.samples for each in group for sample in (each if rows == 2 else [each])]
    assert_same(flat, convert(args, flat), stored(args))
    assert len(flat) == 4 * rows
    assert output.metrics == {
        "engine/groups_sampled": 2,
        "engine/groups_replaced": 0,
        "engine/groups_without_signal": 0,
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
        Episodes.of(args).stop()
    assert source.given == [2, 2, 2]  # every reward is 1
    assert len(output.samples) == 2
    assert output.metrics["engine/groups_replaced"] == 4
    assert output.metrics["engine/groups_without_signal"] == 2


@pytest.mark.usefixtures("results")
def test_groups_of_another_size_are_refused(args: Any) -> None:
    with pytest.raises(TrainError, match="is not 2 samples of one task"):
        generate_rollout(args, 0, Source(size=3))


def test_the_page_from_slime_has_a_spec_and_flags_that_fit(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    page = (root / "docs" / "from-slime.md").read_text()
    specs = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    path = tmp_path / "spec.yaml"
    path.write_text(specs[0].replace("specs/", f"{root}/specs/"))
    loaded = load_spec(path)
    assert not [each for each in check_trainer(loaded, "slime") if each.severity == "error"]
    custom = yaml.safe_load(specs[1])
    assert set(custom) == {"engine_spec", "engine_folder"}
    words = re.search(r"```sh\n(python train.py.*?)```", page, re.DOTALL)
    assert words is not None
    flags = words[1].replace("\\\n", " ").split("--")[1:]
    given = {
        name.strip().replace("-", "_"): value.strip() for name, _, value in (flag.partition(" ") for flag in flags)
    }
    args = SimpleNamespace(
        **{name: yaml.safe_load(value) if value else True for name, value in given.items()}, **custom
    )
    refuse_arguments(args, loaded)


# --- the advantage function, with a stand-in of megatron ---------------------------------------------------------


@pytest.fixture
def megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    """`mpu` of one process, and slime's slicing without context parallelism, which returns its argument."""
    mpu = SimpleNamespace(get_data_parallel_world_size=lambda with_context_parallel: 1)
    core, cp_utils = ModuleType("megatron.core"), ModuleType("slime.backends.megatron_utils.cp_utils")
    core.mpu = mpu  # type: ignore[attr-defined]
    cp_utils.slice_log_prob_with_cp = lambda values, total, response: values  # type: ignore[attr-defined]
    for name in ("megatron", "slime", "slime.backends", "slime.backends.megatron_utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "megatron.core", core)
    monkeypatch.setitem(sys.modules, "slime.backends.megatron_utils.cp_utils", cp_utils)


def arrived(data: dict[str, Any]) -> dict[str, Any]:
    """The columns as a process of the training has them."""
    made = dict(data)
    made["total_lengths"] = [len(tokens) for tokens in data["tokens"]]
    made["tokens"] = [torch.tensor(tokens) for tokens in data["tokens"]]
    made["loss_masks"] = [torch.tensor(mask, dtype=torch.int) for mask in data["loss_masks"]]
    made["rewards"] = [values.clone() for values in data["rewards"]]
    return made


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
    with pytest.raises(TrainError, match="no multiple of --global-batch-size 3"):
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


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"custom_reward_post_process_path": "a.b"}, "--custom-reward-post-process-path"),
        ({"normalize_advantages": True}, "--normalize-advantages"),
        ({"use_opd": True}, "--use-opd"),
        ({"group_rm": True}, "--group-rm"),
        ({"rm_type": "math"}, "--rm-type"),
        ({"partial_rollout": True}, "--partial-rollout"),
        ({"kl_coef": 0.1}, "--kl-coef"),
        ({"rollout_top_p": 0.9}, "--rollout-top-p"),
        ({"advantage_estimator": "ppo"}, "--advantage-estimator ppo"),
        ({"custom_convert_samples_to_train_data_path": None}, "--custom-convert-samples-to-train-data-path None"),
        ({"custom_advantage_function_path": None}, "--custom-advantage-function-path None"),
        ({"rollout_temperature": 1.0}, "--rollout-temperature 1.0: the spec samples with 0.3"),
        ({"eval_temperature": 0.0}, "--eval-temperature 0.0"),
        ({"n_samples_per_prompt": 8}, "--n-samples-per-prompt 8"),
        ({"custom_generate_function_path": "a.b"}, "--custom-generate-function-path"),
        ({"dynamic_sampling_filter_path": "a.b"}, "--dynamic-sampling-filter-path"),
        ({"over_sampling_batch_size": 4}, "--over-sampling-batch-size"),
        ({"log_passrate": True}, "--log-passrate"),
        ({"reward_key": "score"}, "--reward-key"),
    ],
)
def test_arguments_that_change_the_rows_or_have_no_effect_are_refused(
    write: Any, changes: dict[str, Any], said: str
) -> None:
    path = write()
    refuse_arguments(slime_args("http://127.0.0.1:1", path), load_spec(path))
    with pytest.raises(TrainError, match="with slime, change these") as caught:
        refuse_arguments(slime_args("http://127.0.0.1:1", path, **changes), load_spec(path))
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("train", "said"),
    [
        ({"rollout_correction": {"kind": "truncate"}}, "train.rollout_correction without --use-tis"),
        ({"dynamic_sampling": True}, "train.dynamic_sampling with --custom-generate-function-path"),
    ],
)
def test_keys_of_the_spec_without_effect_are_refused(write: Any, train: dict[str, Any], said: str) -> None:
    path = write(train=document(Path())["train"] | train)
    with pytest.raises(TrainError) as caught:
        refuse_arguments(slime_args("http://127.0.0.1:1", path, rollout_function_path="theirs"), load_spec(path))
    assert said in str(caught.value)


# --- slime's own code, from a checkout ----------------------------------------------------------------------------


@pytest.fixture
def source() -> Path:
    found = os.environ.get("SLIME_SOURCE")
    if not found:
        pytest.skip("SLIME_SOURCE is not set: a checkout of THUDM/slime, commit 624b824a8")
    return Path(found)


@pytest.mark.slow
def test_slimes_contract_tests_pass_over_the_hooks(source: Path, write: Any) -> None:
    here = Path(__file__).parents[2]
    folders = [here, *(here / "tests" / name for name in ("integrations", "backends", "kit")), here / "bench"]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, folders)),
        "SLIME_KIT_SPEC": str(write()),
        "SLIME_CONTRACT_CUSTOM_GENERATE_FUNCTION_PATH": "slime_kit.contract_generate",
        "SLIME_CONTRACT_ROLLOUT_FUNCTION_PATH": "slime_kit.contract_rollout",
        "SLIME_CONTRACT_EVAL_FUNCTION_PATH": "slime_kit.contract_rollout",
        "SLIME_CONTRACT_CUSTOM_CONVERT_SAMPLES_TO_TRAIN_DATA_PATH": "slime_kit.contract_convert",
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "slime_kit",
        "-p",
        "no:cacheprovider",
        "tests/plugin_contracts",
    ]
    ran = subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True, check=False, timeout=280)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-2000:]
    assert "36 passed" in ran.stdout


class Mpu:
    """megatron's parallel state of one process, `rank` of `size` that share each sequence."""

    def __init__(self, rank: int, size: int) -> None:
        self.get_context_parallel_rank = lambda: rank
        self.get_context_parallel_world_size = lambda: size
        self.get_data_parallel_world_size = lambda with_context_parallel: size if with_context_parallel else 1
        self.get_data_parallel_group = lambda with_context_parallel: None


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_slimes_schedule_and_slices_carry_the_advantages(
    source: Path, args: Any, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """`build_dp_schedule`, `tensorize_rollout_data_for_training` and `slice_log_prob_with_cp` of the checkout, with a stand-in of megatron."""
    core = ModuleType("megatron.core")
    for name in [name for name in sys.modules if name.partition(".")[0] in ("slime", "megatron")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "megatron", ModuleType("megatron"))
    monkeypatch.setitem(sys.modules, "megatron.core", core)
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    backends = ModuleType("slime.backends.megatron_utils")  # its own file imports megatron
    backends.__path__ = [str(source / "slime" / "backends" / "megatron_utils")]
    monkeypatch.setitem(sys.modules, "slime.backends.megatron_utils", backends)
    monkeypatch.syspath_prepend(str(source))
    core.mpu = Mpu(0, size)
    from slime.observability.rollout_data_utils import tensorize_rollout_data_for_training
    from slime.utils.dp_schedule import build_dp_schedule

    data = convert(args, sampled(args))
    lengths = [len(tokens) for tokens in data["tokens"]]
    schedule = SimpleNamespace(
        micro_batch_size=1, use_dynamic_batch_size=False, balance_by_flops=False, balance_data=False
    )
    parallel = {"dp_size": 1, "cp_size": size, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
    (kept,), *_ = build_dp_schedule(
        schedule, parallel, lengths, global_batch_size=args.global_batch_size, rollout_indices=data["rollout_ids"]
    )
    assert sorted(kept) == [0, 1, 2, 3]
    rollout = {name: [data[name][at] for at in kept] for name in WHITELIST if name in data}
    rollout["total_lengths"] = [lengths[at] for at in kept]
    tensorize_rollout_data_for_training(rollout)
    made = []
    whole = sum(float(values.double().abs().sum()) for values in data["rewards"])
    for rank in range(size):
        core.mpu = Mpu(rank, size)
        if (loaded := sys.modules.get("slime.backends.megatron_utils.cp_utils")) is not None:
            loaded.mpu = core.mpu
        # the sum over processes, which are one here
        monkeypatch.setattr(torch.distributed, "all_reduce", lambda value, group: value.fill_(whole))
        one = dict(rollout)
        advantages(args, one)
        made.append(one["advantages"])
    for at, row in enumerate(kept):
        parts = [each[at] for each in made]
        expected = data["rewards"][row]
        if size == 1:
            assert torch.equal(parts[0], expected)
            continue
        total, response = lengths[row], data["response_lengths"][row]
        chunk = -(-total // 4)  # two parts for each of two processes: first and last, and the two between
        place = torch.arange(total - response - 1, total - 1) // chunk
        for rank in range(2):
            own = torch.cat([expected[place == rank], expected[place == 3 - rank]])
            assert torch.equal(parts[rank], own)
        assert sum(len(part) for part in parts) == response


@pytest.mark.slow
async def test_images_of_all_turns_are_on_the_sample(tmp_path: Path) -> None:
    """A tiny VLM that samples here: the four images of an episode are one sample's tensors."""
    path = tmp_path / "seen.yaml"
    changes = {
        "backend": {"kind": "local", "device": "cpu", "dtype": "float32"},
        "tasks": {"source": "inline", "rows": [{"id": "a"}], "id": "id"},
        "environment": {"use": "vision_code:Gallery"},
        "machine": MACHINE,
        "limits": {"turn_tokens": 5},
        "rollout": {"samples_per_task": 1, "seed": 7},
    }
    made_of = document(vision_kit.build_qwen25(tmp_path / "vlm")) | changes
    path.write_text(yaml.safe_dump({key: value for key, value in made_of.items() if key not in ("prompt", "user")}))
    loaded = load_spec(path)
    form = load_format(loaded.spec.model, loaded.base)
    backend = open_backend(loaded, form)
    await backend.start()
    store = RunStore.create(tmp_path / "runs", RunHeader.of(loaded))
    try:
        await Runner(loaded, load_tasks(loaded), form, backend, store).run()
        (trajectory,) = store.trajectories()
    finally:
        await backend.close()
        store.close()
    assert form.vision is not None
    (made,) = samples_of(Sample("a", 0, 0), trajectory, form.decode, form.vision)
    (branch,) = trajectory.branches
    assert made.tokens == branch.input_ids.tolist()
    assert len(branch.images) == 4
    tensors = form.vision.tensors([[image.image for image in branch.images]])
    assert set(made.multimodal_train_inputs) == {"pixel_values", "image_grid_thw"}
    for name, value in tensors.items():
        assert np.array_equal(made.multimodal_train_inputs[name].numpy(), value)
