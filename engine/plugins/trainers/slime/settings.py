"""The engine's settings among slime's arguments, and the arguments that are refused because they would change the rows or have no effect."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

import structlog

from engine.errors import TrainError
from engine.plugins.trainers.check import refuse
from engine.schemas.backend import SGLangBackendSpec
from engine.schemas.sections import written

if TYPE_CHECKING:
    from engine.spec.load import LoadedSpec

log = structlog.get_logger(__name__)
PACKAGE = "engine.plugins.trainers.slime"
CONVERTER, ADVANTAGES, ROLLOUT = f"{PACKAGE}.convert", f"{PACKAGE}.advantages", f"{PACKAGE}.generate_rollout"
_HANDOVER = {"custom_convert_samples_to_train_data_path": CONVERTER, "custom_advantage_function_path": ADVANTAGES}
_ESTIMATORS = ("grpo", "gspo", "cispo")
Rows = Literal["one", "several"]


@dataclass(frozen=True, slots=True)
class Settings:
    """The keys of `--custom-config-path` that the engine reads."""

    spec: Path
    """`engine_spec`: the spec's file."""
    folder: Path
    """`engine_folder`: the folder of the training; the run store is `rollouts` in it."""
    rows: Rows = "one"
    """`engine_rows`: what `generate` returns. `one`: a sample; an episode with several rows is an error. `several`: a list of samples. slime
    flattens its batch by the type of the first element, so the two cannot be mixed."""

    @classmethod
    def read(cls, args: Any) -> Self:
        """Read them from slime's arguments.

        Raises:
            TrainError: kind `train_setup`: one is missing or invalid.
        """
        spec, folder = getattr(args, "engine_spec", None), getattr(args, "engine_folder", None)
        rows: Rows = getattr(args, "engine_rows", "one")
        if not spec or not folder:
            raise TrainError(
                "slime's arguments have no `engine_spec` or no `engine_folder`; write both into the file of --custom-config-path",
                kind="train_setup",
            )
        if rows not in get_args(Rows):
            raise TrainError(f"`engine_rows` is `one` or `several`, not {rows!r}", kind="train_setup")
        return cls(Path(spec).resolve(), Path(folder).resolve(), rows)


def refuse_arguments(args: Any, loaded: LoadedSpec) -> None:
    """Refuse arguments of slime, and keys of the spec, that would change the engine's rows or have no effect.

    Args:
        args: slime's arguments. One that is missing has no effect.
        loaded: The spec.

    Raises:
        TrainError: kind `train_setup`; the message names all of them.
    """
    spec, train = loaded.spec, loaded.spec.train
    own = getattr(args, "rollout_function_path", None) == ROLLOUT

    def on(name: str) -> bool:
        return bool(getattr(args, name, None))

    problems = {
        f"backend.kind: {spec.backend.kind}: slime samples with SGLang; use `backend: {{kind: sglang}}`": not isinstance(
            spec.backend, SGLangBackendSpec
        ),
        "train.colocate: slime moves the weights; remove it": train is not None and train.colocate,
        "train.difficulty, train.asynchrony.oversample: slime draws the tasks; remove them": train is not None
        and ("difficulty" in written(spec) or train.asynchrony.oversample > 1.0),
        "train.dynamic_sampling with --custom-generate-function-path: set it to false and use --dynamic-sampling-filter-path, or use "
        f"--rollout-function-path {ROLLOUT}": train is not None and train.dynamic_sampling and not own,
        "--custom-reward-post-process-path: the converter takes the engine's advantages": on(
            "custom_reward_post_process_path"
        ),
        "--normalize-advantages: use `train.advantage_norm: batch`": on("normalize_advantages"),
        "--use-opd: it changes the advantages": on("use_opd"),
        "--group-rm, --custom-rm-path, --rm-type: the spec gives the rewards": on("group_rm")
        or on("custom_rm_path")
        or on("rm_type"),
        "--reward-key: a sample's reward is one number": on("reward_key"),
        "--partial-rollout: an episode is never continued by slime": on("partial_rollout"),
        "--log-passrate: it takes n_samples_per_prompt rows for each prompt": on("log_passrate"),
        "--load-debug-rollout-data-subsample: the advantages of a group need all of its episodes": on(
            "load_debug_rollout_data_subsample"
        ),
        "--kl-coef: a custom advantage function gets no penalty; use --use-kl-loss": getattr(args, "kl_coef", 0) != 0,
        "--rollout-top-p below 1: slime would need the ids that the sampler kept": getattr(args, "rollout_top_p", 1.0)
        != 1.0,
    }
    estimator = getattr(args, "advantage_estimator", "grpo")
    problems[f"--advantage-estimator {estimator}: use {', '.join(_ESTIMATORS)}; it only chooses the loss"] = (
        estimator not in _ESTIMATORS
    )
    for name, value in _HANDOVER.items():
        given = getattr(args, name, value)
        problems[f"--{name.replace('_', '-')} {given}: use {value}"] = given != value
    temperature = spec.sampling.temperature
    for name in ("rollout_temperature", "eval_temperature"):
        given = getattr(args, name, None)
        problems[f"--{name.replace('_', '-')} {given}: the spec samples with {temperature:g}"] = (
            given is not None and given != temperature
        )
    samples = getattr(args, "n_samples_per_prompt", spec.rollout.samples_per_task)
    problems[f"--n-samples-per-prompt {samples}: `rollout.samples_per_task` is {spec.rollout.samples_per_task}"] = (
        samples != spec.rollout.samples_per_task
    )
    if own:
        unread = (
            "custom_generate_function_path",
            "dynamic_sampling_filter_path",
            "rollout_sample_filter_path",
            "rollout_all_samples_process_path",
        )
        problems |= {
            f"--{name.replace('_', '-')}: only slime's own rollout function calls it": on(name) for name in unread
        }
        batch = getattr(args, "rollout_batch_size", None)
        problems["--over-sampling-batch-size: use `train.dynamic_sampling`"] = (
            getattr(args, "over_sampling_batch_size", None) or batch
        ) != batch
    corrected = train is not None and train.rollout_correction.kind != "none"
    problems["train.rollout_correction without --use-tis: add the flag, or set `kind: none`"] = corrected and not on(
        "use_tis"
    )
    refuse(loaded, "slime", problems)
    if not on("use_tis") and not on("use_rollout_logprobs"):
        log.warning(
            "slime only logs the sampler's log-probs; --use-rollout-logprobs or --use-tis puts them into the loss"
        )


def router_url(args: Any) -> str:
    """The URL of slime's SGLang router.

    Raises:
        TrainError: kind `train_setup`: slime has started none.
    """
    host, port = getattr(args, "sglang_router_ip", None), getattr(args, "sglang_router_port", None)
    if not host or not port:
        raise TrainError(
            "slime's arguments have no router (`sglang_router_ip`, `sglang_router_port`); episodes need its servers",
            kind="train_setup",
        )
    return f"http://{host}:{port}"
