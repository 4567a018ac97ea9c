"""What of each trainer ran on a CPU and by which tests, what was only read in its source, and how it installs beside the engine.

docs/trainers.md is generated from it. `scripts/trainer_envs.sh test` runs the tests, and `scripts/check_resolution.py` repeats the resolutions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

PARTS: Mapping[str, str] = {
    "sampler": "its sampler as the engine's backend",
    "handover": "rows become its batch",
    "advantages": "advantages by token in its batch",
    "images": "images",
    "steps": "optimisation steps",
}
"""What an adapter consists of, in the order of the table."""

Seen = Literal["ran", "scripted", "read", "refused"]
"""`ran`: the trainer's own code ran with the engine's. `scripted`: the same, but a script replies in place of its model servers.
`read`: only its source was read. `refused`: the adapter refuses it."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known of one part of an adapter."""

    seen: Seen
    how: str
    tests: tuple[str, ...] = ()
    """Files below `tests/`, or scripts, in which it ran."""


@dataclass(frozen=True, slots=True)
class Installed:
    """How a trainer and the engine install into one environment."""

    resolved: bool
    """Whether uv resolves both, without the engine's constraints."""
    versions: str
    """The versions that uv chose; empty if it was not resolved."""
    how: str
    """What to install."""


def _ran(how: str, *tests: str) -> Evidence:
    return Evidence("ran", how, tests)


def _scripted(how: str, *tests: str) -> Evidence:
    return Evidence("scripted", how, tests)


_IT = "tests/plugins/trainers/"
_AGREE = _IT + "trainers_agree/test_agree.py"
_TRL = _IT + "test_trainer_trl.py"
_VERL, _LOOP = _IT + "test_trainer_verl.py", _IT + "test_trainer_verl_loop.py"
_VERL_IMAGES = _IT + "test_trainer_verl_images.py"
_SKYRL, _SKYRL_IMAGES = _IT + "trainer_skyrl/test_one_step_skyrl.py", _IT + "trainer_skyrl/test_images_skyrl.py"
_AREAL, _AREAL_IMAGES = _IT + "trainer_areal/test_one_step_areal.py", _IT + "trainer_areal/test_images_areal.py"
_SLIME = _IT + "trainer_slime/test_slime_"

EVIDENCE: Mapping[str, Mapping[str, Evidence]] = {
    "trl": {
        "sampler": _ran("the model of `GRPOTrainer`, with its weights of each step", _TRL),
        "handover": _ran("`rollout_func`; TRL's shuffling and slicing", _TRL),
        "advantages": _ran("what `_compute_loss` reads; the loss equals the hand-computed one", _TRL, _AGREE),
        "images": _ran("tiny Qwen2.5-VL, Idefics3 and SmolVLM: log-probs to 1e-5; 128 steps in its section", _TRL),
        "steps": _ran("the figures of its section", _TRL, "scripts/train_with_trl.py"),
    },
    "verl": {
        "sampler": _scripted("the agent loop manager on a local Ray; a script replies as its servers", _VERL),
        "handover": _ran(
            "TransferQueue on a local Ray; two steps of `verl.trainer.main_ppo`, with stand-ins for servers and actor",
            _VERL,
            _IT + "test_trainer_verl_page.py",
        ),
        "advantages": _ran("the registered `_compute_advantage`", _VERL, _IT + "trainers_agree/test_agree_verl.py"),
        "images": _ran("its training worker: log-probs to 1e-5; exchanged images are found", _VERL_IMAGES),
        "steps": _ran("one step of that worker; packed rows, its servers and Megatron need GPUs", _VERL_IMAGES),
    },
    "verl_agent_loop": {
        "sampler": _scripted("verl's own agent loop workers on a local Ray; a script replies as its servers", _LOOP),
        "handover": _ran("TransferQueue and DataProto, on a local Ray", _LOOP),
        "advantages": _ran("verl's own GRPO and RLOO over one reward for each episode", _LOOP),
        "images": _ran("its agent loop workers and its training worker: log-probs to 1e-5", _VERL_IMAGES),
        "steps": Evidence("read", "its servers need GPUs; the worker is that of the line above"),
    },
    "slime": {
        "sampler": _scripted("its rollout and generate functions", _SLIME + "hooks.py"),
        "handover": _ran("its contract tests, schedule and slices, from a checkout", _SLIME + "source.py"),
        "advantages": _ran(
            "converter and advantage function", _SLIME + "source.py", _IT + "trainers_agree/test_agree_slime.py"
        ),
        "images": _scripted("tensors of four images", _SLIME + "images.py"),
        "steps": Evidence("read", "its Megatron loss needs GPUs"),
    },
    "skyrl": {
        "sampler": _scripted("`RayPPOTrainer.generate` with the engine's generator", _SKYRL),
        "handover": _ran("`postprocess_generator_output`, `convert_to_training_input`", _SKYRL, _AGREE),
        "advantages": _ran("`compute_advantages_and_returns`", _SKYRL, _AGREE),
        "images": _scripted("its model wrapper: log-probs to 1e-5; exchanged images are found", _SKYRL_IMAGES),
        "steps": _ran("passes of its policy worker, and AdamW; FSDP and Megatron need GPUs", _SKYRL_IMAGES),
    },
    "areal": {
        "sampler": _scripted("`WorkflowExecutor` with the engine's workflow; a script replies as its engine", _AREAL),
        "handover": _ran("`rollout_batch`, `check_trajectory_format`, `concat_padded_tensors`", _AREAL, _AGREE),
        "advantages": _ran("`PPOActor.compute_advantages`", _AREAL, _AGREE),
        "images": _scripted("its FSDP engine: log-probs to 1e-5; exchanged images are found", _AREAL_IMAGES),
        "steps": _ran("`ppo_update` of `FSDPPPOActor`; controllers and Megatron need GPUs", _AREAL_IMAGES),
    },
}
"""By the name that `--trainer` takes; the other trainers were only read."""


def _first(part: str) -> dict[str, str]:
    return {name: parts[part].tests[0] for name, parts in EVIDENCE.items()}


_WINDOWS = "tests/plugins/condense/test_window_rules.py"
_ROUTED = {"verl": _VERL_IMAGES, "verl_agent_loop": _VERL_IMAGES, "skyrl": _SKYRL_IMAGES}
CELLS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "text": ("token_ids", _first("sampler")),
    "images": ("images", _first("images")),
    "windows of images": ("branches", _first("images") | dict.fromkeys(("trl", "skyrl"), _WINDOWS)),
    "expert routing": ("expert_routing", dict.fromkeys(EVIDENCE, "tests/validate/test_expert_rules.py") | _ROUTED),
    "several rows of an episode": ("branches", _first("handover") | {"skyrl": _IT + "test_trainer_skyrl.py"}),
}
"""The columns of the table of tests: the thing of `THINGS` that says what is carried, and the test by trainer."""

RESOLVED = "2026-11-23"
"""The day of `INSTALLED`."""
INSTALLED: Mapping[str, Installed] = {
    "trl": Installed(
        True, "trl 1.16.0, torch 2.15.0, transformers 5.23.0", "the extra `trl`; `trl[vllm]` resolves too"
    ),
    "verl": Installed(
        True,
        "verl 0.9.1, torch 2.15.0, transformers 5.10.4",
        "the extra `verl`; `verl[vllm]` resolves too; `verl[sglang]`: unknown, it was not resolved within 100 s",
    ),
    "slime": Installed(
        False, "", "slime is on no registry: use its image or its checkout, then install the engine there"
    ),
    "skyrl": Installed(
        True,
        "skyrl 0.3.0, torch 2.15.0, transformers 5.8.0",
        "the extra `skyrl`: what its trainer imports, without vLLM and flash-attn (0.3, which the adapter ran with; on Python 3.12 the newest 0.4.0 resolves too); its own extra `fsdp` needs a version of flashinfer-jit-cache that is not on PyPI: install it by SkyRL's instructions, then the engine",
    ),
    "areal": Installed(
        True,
        "areal 1.0.4, torch 2.10.0, transformers 5.3.0, math-verify 0.8.0",
        "the extra `areal`, with Python 3.11 or 3.12; its own extra `cuda` does not resolve even alone (two versions of nvidia-cudnn-cu12): install it by AReaL's instructions, then the engine",
    ),
}
"""By the name that `--trainer` takes."""
