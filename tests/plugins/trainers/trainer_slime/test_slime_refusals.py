"""Arguments of slime and keys of a spec that would change the rows or have no effect."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from slime_kit import (
    document,
    slime_args,
)
from structlog.testing import capture_logs

from engine.errors import TrainError
from engine.plugins.trainers.slime.settings import Settings, refuse_arguments, router_url
from engine.spec.load import load_spec


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
        ({"advantage_estimator": "ppo"}, "--advantage-estimator=ppo"),
        ({"custom_convert_samples_to_train_data_path": None}, "--custom-convert-samples-to-train-data-path=null"),
        ({"custom_advantage_function_path": None}, "--custom-advantage-function-path=null"),
        ({"rollout_temperature": 1.0}, "--rollout-temperature=1.0: the spec samples with 0.3"),
        ({"eval_temperature": 0.0}, "--eval-temperature=0.0"),
        ({"n_samples_per_prompt": 8}, "--n-samples-per-prompt=8"),
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


def test_log_probs_that_are_only_logged_are_announced(write: Any) -> None:
    path = write()
    args = slime_args("http://127.0.0.1:1", path)
    with capture_logs() as logs:
        refuse_arguments(args, load_spec(path))
    assert [each["event"] for each in logs] == [
        "slime only logs the sampler's log-probs; --use-rollout-logprobs or --use-tis puts them into the loss"
    ]
    args.use_rollout_logprobs = True
    with capture_logs() as logs:
        refuse_arguments(args, load_spec(path))
    assert not logs


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"engine_spec": None}, "no `engine_spec` or no `engine_folder`"),
        ({"engine_rows": "two"}, "`engine_rows` is `one` or `several`, not 'two'"),
    ],
)
def test_settings_that_are_missing_or_invalid(write: Any, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(TrainError, match=said):
        Settings.read(slime_args("http://127.0.0.1:1", write(), **changes))


def test_slime_without_a_router(write: Any) -> None:
    assert router_url(slime_args("http://127.0.0.1:1", write())) == "http://127.0.0.1:1"
    with pytest.raises(TrainError, match="have no router"):
        router_url(SimpleNamespace(sglang_router_ip=None, sglang_router_port=None))
