"""The engine's settings among slime's arguments, and the arguments that are refused because they would change the rows
or have no effect."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

import structlog

from engine.errors import TrainError
from engine.plugins.sglang.spec import SGLangBackendSpec
from engine.plugins.trainers.library import OFF, Row, refuse, value_of
from engine.schemas.sections import written
from engine.schemas.train import TrainSpec

if TYPE_CHECKING:
    from engine.spec.load import LoadedSpec

log = structlog.get_logger(__name__)
PACKAGE = "engine.plugins.trainers.slime"
CONVERTER, ADVANTAGES, ROLLOUT = f"{PACKAGE}.convert", f"{PACKAGE}.advantages", f"{PACKAGE}.generate_rollout"
_ARGUMENTS: list[Row] = [
    ("--custom-convert-samples-to-train-data-path", (CONVERTER,), f"use {CONVERTER}"),
    ("--custom-advantage-function-path", (ADVANTAGES,), f"use {ADVANTAGES}"),
    ("--custom-reward-post-process-path", OFF, "the converter takes the engine's advantages"),
    ("--normalize-advantages", OFF, "use `train.advantage_norm: batch`"),
    ("--use-opd", OFF, "it changes the advantages"),
    ("--group-rm", OFF, "the spec gives the rewards"),
    ("--custom-rm-path", OFF, "the spec gives the rewards"),
    ("--rm-type", OFF, "the spec gives the rewards"),
    ("--reward-key", OFF, "a sample's reward is one number"),
    ("--partial-rollout", OFF, "an episode is never continued by slime"),
    ("--log-passrate", OFF, "it takes n_samples_per_prompt rows for each prompt"),
    ("--load-debug-rollout-data-subsample", OFF, "the advantages of a group need all of its episodes"),
    ("--kl-coef", OFF, "a custom advantage function gets no penalty; use --use-kl-loss"),
    ("--rollout-top-p", (None, 1.0), "slime would need the ids that the sampler kept"),
    (
        "--advantage-estimator",
        (None, "grpo", "gspo", "cispo"),
        "use grpo, gspo, cispo; it only chooses the loss",
    ),
]
_ARGUMENTS_OF_ITS_ROLLOUT: list[Row] = [
    (name, OFF, "only slime's own rollout function calls it")
    for name in (
        "--custom-generate-function-path",
        "--dynamic-sampling-filter-path",
        "--rollout-sample-filter-path",
        "--rollout-all-samples-process-path",
    )
]
Rows = Literal["one", "several"]


@dataclass(frozen=True, slots=True)
class Settings:
    """The keys of `--custom-config-path` that the engine reads."""

    spec: Path
    """`engine_spec`: the spec's file."""
    folder: Path
    """`engine_folder`: the folder of the training; the run store is `rollouts` in it."""
    rows: Rows = "one"
    """`engine_rows`: what `generate` returns. `one`: a sample; an episode with several rows is an error. `several`: a
    list of samples. slime flattens its batch by the type of the first element, so the two cannot be mixed."""

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
                "slime's arguments have no `engine_spec` or no `engine_folder`; write both into the file of "
                "--custom-config-path",
                kind="train_setup",
            )
        if rows not in get_args(Rows):
            raise TrainError(f"`engine_rows` is `one` or `several`, not {rows!r}", kind="train_setup")
        return cls(Path(spec).resolve(), Path(folder).resolve(), rows)


def refuse_arguments(args: Any, loaded: LoadedSpec) -> None:
    """Refuse arguments of slime, and keys of the spec, that would change the engine's rows or have no effect.

    Raises:
        TrainError: kind `train_setup`; the message names all of them.
    """
    spec, train = loaded.spec, loaded.spec.train or TrainSpec()
    temperature, samples = spec.sampling.temperature, spec.rollout.samples_per_task
    engine_rollout = value_of(args, "rollout_function_path") == ROLLOUT
    corrected = loaded.spec.train is not None and train.rollout_correction.kind != "none"
    table = [
        *_ARGUMENTS,
        *(
            (name, (None, temperature), f"the spec samples with {temperature:g}")
            for name in ("--rollout-temperature", "--eval-temperature")
        ),
        ("--n-samples-per-prompt", (None, samples), f"`rollout.samples_per_task` is {samples}"),
    ]
    if engine_rollout:
        sizes = (None, 0, value_of(args, "rollout_batch_size"))
        table += [*_ARGUMENTS_OF_ITS_ROLLOUT, ("--over-sampling-batch-size", sizes, "use `train.dynamic_sampling`")]
    conditions = {
        f"backend.kind: {spec.backend.kind}: slime samples with SGLang; use "
        "`backend: {kind: sglang}`": not isinstance(spec.backend, SGLangBackendSpec),
        "train.colocate: slime moves the weights; remove it": train.colocate,
        "train.difficulty, train.asynchrony.oversample: slime draws the tasks; remove them": "difficulty"
        in written(spec)
        or train.asynchrony.oversample > 1.0,
        "train.dynamic_sampling with --custom-generate-function-path: set it to false and use "
        f"--dynamic-sampling-filter-path, or use --rollout-function-path {ROLLOUT}": loaded.spec.train is not None
        and train.dynamic_sampling
        and not engine_rollout,
        "train.rollout_correction without --use-tis: add the flag, or set `kind: none`": corrected
        and not value_of(args, "use_tis"),
    }
    refuse(loaded, "slime", args, table, conditions)
    if not value_of(args, "use_tis") and not value_of(args, "use_rollout_logprobs"):
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
