"""LoRA by peft: low-rank matrices beside frozen linear layers."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from engine.errors import TrainError
from engine.schemas.train import LoraSpec


class Adapter:
    """The adapter of a model, which is changed in place: `base_layer`s inside its wrapped linear layers."""

    def __init__(self, model: Any, spec: LoraSpec, seed: int) -> None:
        """Put it in; its first output is zero.

        Args:
            model: A model of transformers.
            spec: Rank, scale, dropout, and which layers.
            seed: Seeds the first of the two matrices.

        Raises:
            TrainError: peft is not installed, or the model has no such layers.
        """
        try:
            from peft import LoraConfig, get_peft_model
            from peft.tuners.tuners_utils import BaseTunerLayer
        except ImportError as error:
            raise TrainError(
                "`train.lora` needs peft: pip install 'episode-engine[train]'", kind="train_setup"
            ) from error
        config = LoraConfig(
            task_type="CAUSAL_LM",
            r=spec.rank,
            lora_alpha=spec.alpha,
            lora_dropout=spec.dropout,
            target_modules=spec.target_modules,
        )
        head = model.get_output_embeddings()
        try:
            with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # peft's, of transformers' newer names
                torch.manual_seed(seed)
                self._peft: Any = get_peft_model(model, config)
        except ValueError as error:
            raise TrainError(f"`train.lora.target_modules`: {error}", kind="train_setup") from error
        if model.get_output_embeddings() is not head:
            raise TrainError(
                "`train.lora.target_modules`: the output layer cannot be adapted; leave it out", kind="train_setup"
            )
        self._model = model
        self._layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
        self._dropouts = [
            dropout
            for module in model.modules()
            for dropout in getattr(module, "lora_dropout", {}).values()
            if isinstance(dropout, torch.nn.Dropout) and dropout.p > 0
        ]
        model.eval()

    @property
    def has_dropout(self) -> bool:
        """Whether it has dropout."""
        return bool(self._dropouts)

    def dropout(self, on: bool) -> None:
        """Its dropout, on or off."""
        for dropout in self._dropouts:
            dropout.training = on

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """The model without it. peft's own way would thaw what `freeze` names when it puts the adapter back."""
        for layer in self._layers:
            layer._disable_adapters = True
        try:
            yield
        finally:
            for layer in self._layers:
                layer._disable_adapters = False

    def merged(self) -> dict[str, torch.Tensor]:
        """The model's weights with the adapter added, under the names they had without it; the model stays as it is."""
        state: dict[str, torch.Tensor] = {}
        for name, tensor in self._model.state_dict().items():
            if ".lora_" not in name:
                state[name.replace(".base_layer.", ".")] = tensor
        with torch.no_grad():
            for name, module in self._model.named_modules():
                if hasattr(module, "get_delta_weight"):
                    weight = module.get_base_layer().weight
                    delta = sum(module.get_delta_weight(adapter) for adapter in module.active_adapters)
                    state[f"{name}.weight"] = (weight.to(delta.dtype) + delta).to(weight.dtype).detach()
        return state

    def save(self, folder: Path) -> None:
        """As peft writes it: adapter_config.json, adapter_model.safetensors."""
        self._peft.save_pretrained(folder, save_embedding_layers=False)
