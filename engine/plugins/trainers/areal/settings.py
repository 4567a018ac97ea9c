"""Settings of AReaL that are refused, because they would change the engine's advantages or have no effect on its episodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.plugins.trainers.areal.sampler import names_of
from engine.plugins.trainers.check import refuse
from engine.plugins.trainers.sampler import unsupported
from engine.validate.model_files import model_files

if TYPE_CHECKING:
    from engine.spec.load import LoadedSpec


def refuse_settings(config: Any, loaded: LoadedSpec) -> None:
    """Refuse settings of AReaL that would change the engine's advantages, or have no effect on its episodes.

    Raises:
        TrainError: kind `train_setup`; the message names all of them.
    """
    actor, sampling = config.actor, config.gconfig
    temperature = loaded.spec.sampling.temperature
    problems = {
        f"actor.discount: {actor.discount:g}; set it to 0": actor.discount != 0,
        f"actor.kl_ctl: {actor.kl_ctl:g}; set it to 0": actor.kl_ctl != 0,
        "actor.reward_norm: set it to null; the engine's credit has the baseline": actor.reward_norm is not None,
        "actor.adv_norm: set it to null": actor.adv_norm is not None,
        "actor.overlong_reward_penalty: use `train.overlong`": actor.overlong_reward_penalty,
        "actor.mask_no_eos_with_zero: it would take the reward from the last token of the longest rows": actor.mask_no_eos_with_zero,
        "critic: it would overwrite the column `values`": getattr(config, "critic", None) is not None,
        f"gconfig.n_samples: {sampling.n_samples}; set it to 1, the engine runs the {loaded.spec.rollout.samples_per_task} episodes of a group": sampling.n_samples
        != 1,
        f"actor.temperature: {actor.temperature:g}; the spec samples with {temperature:g}": actor.temperature
        != temperature,
    }
    rollout, server = config.rollout, str(config.rollout.backend).partition(":")[0]
    sampling, kind = loaded.spec.sampling, loaded.spec.backend.kind
    foreign = ", ".join(f"`sampling.{name}`" for name in unsupported(sampling, names_of(server)))
    problems |= {
        f"AReaL does not send {foreign} to {server or 'its servers'}": bool(foreign),
        f"rollout.backend: {server} gives the log-probs of temperature 1, and the spec samples with {temperature:g}; use sglang": server
        == "vllm"
        and temperature != 1,
        f"backend.kind: {kind}: its replies have no ids; use `backend: {{kind: sglang}}`": not loaded.spec.backend.exact_ids,
        "`train.advantage_norm: batch`: groups are handed over one by one": loaded.spec.train is not None
        and loaded.spec.train.advantage_norm == "batch",
        "dynamic_bs: groups without signal are handed over too": getattr(config, "dynamic_bs", False),
        "rollout.return_routed_experts: no trainer of AReaL reads them": rollout.return_routed_experts,
    }
    files = model_files(loaded)
    if files is not None and files.sees:
        problems |= {
            "rollout.backend: vllm takes images with messages only, which it tokenises again; use sglang": server
            == "vllm",
            "rollout.check_trajectory_format: rows without an image have no pixel_values": rollout.check_trajectory_format,
            "actor.enable_tree_training: its positions do not know images": actor.enable_tree_training,
        }
    refuse(loaded, "AReaL", problems)
