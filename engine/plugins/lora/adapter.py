"""LoRA adapters by peft: trained low-rank matrices next to frozen linear layers."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from engine.errors import TrainError
from engine.plugins.lora.spec import LoraSpec
from engine.train.policy import Adapter


class LoraAdapter(Adapter):
    """The adapter of a model. It changes the model in place: linear layers become wrappers with a `base_layer`."""

    def __init__(self, model: Any, spec: LoraSpec, seed: int) -> None:
        """Add the adapter to the model. Its output is zero at first.

        Args:
            model: A transformers model.
            spec: Rank, scale, dropout and target layers.
            seed: Seed of the first of the two matrices; the second is zero.

        Raises:
            TrainError: kind `train_setup`: peft is not installed, or the model has no such layers.
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
            with torch.random.fork_rng(devices=[]), warnings.catch_warnings(), _kept_values(BaseTunerLayer):
                warnings.simplefilter("ignore", FutureWarning)  # peft uses deprecated names of transformers
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
        self.has_dropout = bool(self._dropouts)
        self.names = [name for name, _ in model.named_parameters() if ".lora_" in name]
        model.eval()

    def dropout(self, on: bool) -> None:
        """Turn the adapter's dropout on or off."""
        for dropout in self._dropouts:
            dropout.training = on

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """A context in which the model runs without the adapter. peft's own context would unfreeze parameters of
        `freeze`."""
        for layer in self._layers:
            layer._disable_adapters = True
        try:
            yield
        finally:
            for layer in self._layers:
                layer._disable_adapters = False

    def merged(self) -> dict[str, torch.Tensor]:
        """The model's weights with the adapter merged in, under their names without adapter. The model is not changed.

        Each weight has the shape of the model's parameter.
        """
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
        """Write adapter_config.json and adapter_model.safetensors in peft's format."""
        state = {
            f"base_model.model.{name}": tensor for name, tensor in self._model.named_parameters() if ".lora_" in name
        }
        self._peft.save_pretrained(folder, save_embedding_layers=False, state_dict=state)


@contextmanager
def _kept_values(layer: Any) -> Iterator[None]:
    """Give a new adapter its first values if its base model is on the meta device, where peft moves adapters too."""
    moved = layer._move_adapter_to_device_of_base_layer
    first_values: list[tuple[Any, dict[str, torch.Tensor]]] = []

    def keep(self: Any, name: str, device: torch.device | None = None) -> None:
        if any(parameter.is_meta for parameter in self.get_base_layer().parameters()):
            moved(self, name, torch.device("cpu"))  # sets the dtype
            first_values.append(
                (
                    self,
                    {key: parameter.detach().clone() for key, parameter in self.named_parameters() if "lora_" in key},
                )
            )
        moved(self, name, device)

    layer._move_adapter_to_device_of_base_layer = keep
    try:
        yield
    finally:
        layer._move_adapter_to_device_of_base_layer = moved
    for wrapper, values in first_values:
        for key, value in values.items():
            path, _, name = key.rpartition(".")
            module = wrapper.get_submodule(path)
            was = module._parameters[name]
            module._parameters[name] = torch.nn.Parameter(value.to(was.dtype), requires_grad=was.requires_grad)
