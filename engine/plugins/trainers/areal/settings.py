"""Settings of AReaL that are refused, because they would change the engine's advantages or have no effect on its
episodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.plugins.trainers.areal.backend import names_of
from engine.plugins.trainers.backend import unsupported
from engine.plugins.trainers.settings import OFF, Row, refuse
from engine.validate.model_files import model_files

if TYPE_CHECKING:
    from engine.spec.load import LoadedSpec

_SETTINGS: list[Row] = [
    ("actor.discount", (0,), "set it to 0"),
    ("actor.kl_ctl", (0,), "set it to 0"),
    ("actor.reward_norm", OFF, "set it to null; the engine's credit has the baseline"),
    ("actor.adv_norm", OFF, "set it to null"),
    ("actor.overlong_reward_penalty", OFF, "use `train.overlong`"),
    ("actor.mask_no_eos_with_zero", OFF, "it would take the reward from the last token of the longest rows"),
    ("critic", OFF, "it would overwrite the column `values`"),
    ("dynamic_bs", OFF, "groups without signal are handed over too"),
    ("rollout.return_routed_experts", OFF, "no trainer of AReaL reads them"),
]
_SETTINGS_WITH_IMAGES: list[Row] = [
    ("rollout.check_trajectory_format", OFF, "rows without an image have no pixel_values"),
    ("actor.enable_tree_training", OFF, "its positions do not know images"),
]


def refuse_settings(config: Any, loaded: LoadedSpec) -> None:
    """Refuse settings of AReaL that would change the engine's advantages, or have no effect on its episodes.

    Raises:
        TrainError: kind `train_setup`; the message names all of them.
    """
    spec, server = loaded.spec, str(config.rollout.backend).partition(":")[0]
    temperature, samples = spec.sampling.temperature, spec.rollout.samples_per_task
    foreign = ", ".join(f"`sampling.{name}`" for name in unsupported(spec.sampling, names_of(server)))
    files = model_files(loaded)
    sees = files is not None and bool(files.sees)
    table = [
        *_SETTINGS,
        ("gconfig.n_samples", (1,), f"set it to 1, the engine runs the {samples} episodes of a group"),
        ("actor.temperature", (temperature,), f"the spec samples with {temperature:g}"),
        *(_SETTINGS_WITH_IMAGES if sees else ()),
    ]
    batch_norm = spec.train is not None and spec.train.advantage_norm == "batch"
    conditions = {
        f"AReaL does not send {foreign} to {server or 'its servers'}": bool(foreign),
        f"rollout.backend: {server} gives the log-probs of temperature 1, and the spec samples with {temperature:g}; "
        "use sglang": server == "vllm" and temperature != 1,
        f"backend.kind: {spec.backend.kind}: its replies have no ids; "
        "use `backend: {kind: sglang}`": not spec.backend.exact_ids,
        "`train.advantage_norm: batch`: groups are handed over one by one": batch_norm,
        "rollout.backend: vllm takes images with messages only, which it tokenises again; use sglang": sees
        and server == "vllm",
    }
    refuse(loaded, "AReaL", config, table, conditions)
