"""verl's own FSDP engine and training worker on a CPU, and what stands for its servers, by verl's own interfaces for
other devices: a module of VERL_USE_EXTERNAL_MODULES, before others."""

from __future__ import annotations

import os
import socket
import zlib
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.plugin.platform.platform_manager import set_platform


class Cpu(PlatformCUDA):  # type: ignore[misc]
    """The CPU as verl's device."""

    device_name, vendor_name = "cpu", "none"
    device_module = SimpleNamespace(
        memory_allocated=lambda: 0,
        memory_reserved=lambda: 0,
        max_memory_allocated=lambda: 0,
        max_memory_reserved=lambda: 0,
        mem_get_info=lambda: (0, 0),
        empty_cache=lambda: None,
        synchronize=lambda: None,
        set_device=lambda index: None,
        get_device_name=lambda: "CPU",
    )

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return "cpu"

    def communication_backend_name(self) -> str:
        return "gloo"


VERSIONS = {"global_steps": 4, "min_global_steps": 4, "max_global_steps": 4}


class Servers:
    """Does what verl's vLLM server does with a request, and replies words by a rule with the model's own log-probs.

    Args:
        model: The folder of the model.
    """

    def __init__(self, model: str) -> None:
        self._folder = model

    @cached_property
    def _processor(self) -> Any:
        from engine.schemas.model import ModelSpec
        from engine.tokens.loading import load_format

        vision = load_format(ModelSpec(path=self._folder), Path(self._folder)).vision
        assert vision is not None
        return vision.processing.processor

    @cached_property
    def _model(self) -> Any:
        import torch
        from transformers import AutoModelForImageTextToText

        torch.set_num_threads(1)
        options = {"dtype": torch.float32, "attn_implementation": "eager"}
        return AutoModelForImageTextToText.from_pretrained(self._folder, **options).eval()

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], image_data: Any = None
    ) -> Any:
        import torch
        from verl.workers.rollout.replica import TokenOutput
        from verl.workers.rollout.utils import qwen2_5_vl_dedup_image_tokens

        pad, images = self._processor.image_token_id, image_data or []
        compact = qwen2_5_vl_dedup_image_tokens(prompt_ids, self._processor)
        assert compact.count(pad) == len(images), "vLLM would refuse the prompt"
        tensors = {} if not images else self._processor.image_processor(images=images, return_tensors="pt")
        counts = iter([] if not images else (tensors["image_grid_thw"].prod(1) // 4).tolist())
        expanded = [each for token in compact for each in [token] * (next(counts) if token == pad else 1)]
        assert expanded == prompt_ids, "the server would compute on another prompt"
        start = zlib.crc32(f"{request_id} {len(prompt_ids)}".encode())
        count = 2 + len(prompt_ids) % (sampling_params["max_new_tokens"] - 1)  # so episodes have equal lengths
        reply = [40 + (start * 7 + place * 3) % 50 for place in range(count)]
        ids = torch.tensor([prompt_ids + reply])
        with torch.no_grad():
            logits = self._model(
                input_ids=ids, mm_token_type_ids=(ids == pad).int(), attention_mask=torch.ones_like(ids), **tensors
            ).logits[0]
        logprobs = logits.log_softmax(-1)[len(prompt_ids) - 1 : -1].gather(1, ids[0, len(prompt_ids) :, None])
        return TokenOutput(
            token_ids=reply, log_probs=logprobs[:, 0].tolist(), stop_reason="completed", extra_fields=dict(VERSIONS)
        )


class RoutedServers:
    """Replies by a rule, with the experts of all tokens but the last, and of one more as some servers report it."""

    def __init__(self, model: str) -> None:
        """`model` is not read."""

    async def generate(self, request_id: str, *, prompt_ids: list[int], **_: Any) -> Any:
        import numpy as np
        from verl.workers.rollout.replica import TokenOutput

        reply = [40 + len(prompt_ids) % 50, 41]
        draw = np.random.default_rng(sum(prompt_ids)).random((len(prompt_ids) + len(reply), 3, 8))
        return TokenOutput(
            token_ids=reply,
            log_probs=[-1.0] * len(reply),
            routed_experts=draw.argsort(-1)[..., :3].astype(np.int32),
            stop_reason="completed",
            extra_fields=dict(VERSIONS),
        )


set_platform(Cpu())  # before modules of verl read the device's name


def training_worker(model: str, actor: Any) -> Any:
    """verl's TrainingWorker of the actor, in this process alone, in float32.

    Args:
        model: The folder of the model.
        actor: verl's configuration `actor_rollout_ref.actor`.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    from functools import partial

    import torch
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.config import HFModelConfig, TrainingWorkerConfig
    from verl.workers.engine import EngineRegistry
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
    from verl.workers.engine_workers import TrainingWorker
    from verl.workers.utils.losses import ppo_loss

    torch.distributed.init_process_group("gloo")
    EngineRegistry.register(model_type="language_model", backend=["fsdp2"], device=["cpu"])(FSDPEngineWithLMHead)
    settings = omega_conf_to_dataclass(actor)
    # Packed rows need flash-attention.
    settings.model_config = HFModelConfig(
        path=model,
        override_config={"attn_implementation": "eager"},
        use_remove_padding=False,
        enable_gradient_checkpointing=False,
    )
    worker = TrainingWorker(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=settings.model_config,
            engine_config=settings.engine,
            optimizer_config=settings.optim,
            checkpoint_config=settings.checkpoint,
            profiler_config=None,
        )
    )
    worker.engine_config.use_dynamic_bsz = True
    worker.engine_config.max_token_len_per_gpu = worker.engine_config.infer_max_token_len_per_gpu = 300
    worker.reset()
    worker.set_loss_fn(partial(ppo_loss, config=settings))
    return worker
