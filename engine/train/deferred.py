"""Models that are made without memory, so that several processes can shard them before any weight is read.

    deferred = DeferredWeights(folder, torch.float32, kind)
    run = process_group.shard(deferred.model)      # the parameters get memory for this process's part
    deferred.fill(process_group)                   # each process reads its part of each weight

Invariant: no process holds more than one weight in full while it fills its shards. Only where the folder has no
safetensors files, process 0 loads the whole model on its CPU and sends the parts to the others.
"""

from __future__ import annotations

import re
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from engine.errors import TrainError
from engine.tokens.catalogue import no_bars
from engine.train.files import read_tensors, tensor_files

if TYPE_CHECKING:
    from engine.train.distributed import ProcessGroup


class DeferredWeights:
    """A transformers model on the meta device, and which tensor of its files belongs to which of its weights.

    Args:
        folder: Folder of the model's files.
        dtype: Dtype of the weights.
        kind: The transformers class that makes the model, such as `AutoModelForCausalLM`.

    Raises:
        OSError, ValueError: transformers cannot make the model.
        TrainError: kind `train_setup`: the files lack a weight of the model.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, kind: Any) -> None:
        from accelerate import init_empty_weights
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        with init_empty_weights(include_buffers=False), no_bars():
            self.model = kind.from_config(config, dtype=dtype, attn_implementation="sdpa")
        self.model.tie_weights()
        self._folder, self._dtype, self._kind = folder, dtype, kind
        self._files = tensor_files(folder)
        self._slots = _slots(self.model)
        for pattern, wider in self.model._get_dtype_plan(dtype).items():  # weights that its class keeps in float32
            matcher = re.compile(pattern.replace(".", r"\.").replace("*", r"\w+"))
            for name, (module, attribute) in self._slots.items():
                parameter = module._parameters.get(attribute)
                if parameter is not None and matcher.search(name):
                    module._parameters[attribute] = nn.Parameter(parameter.detach().to(wider))
        self._sources: dict[str, str] = {}
        """The tensor of the files by the weight that equals it."""
        self._conversions: dict[str, tuple[Any, list[tuple[str, str]]]] = {}
        """Conversions of several tensors of the files, by their first weight: the conversion, its tensors and their
        patterns."""
        if self._files:
            self._map_names()

    def fill(self, process_group: ProcessGroup) -> None:
        """Read this process's part of each weight. Every process must call this, after the model was sharded.

        Raises:
            TrainError: kind `train_setup`: the files cannot be read.
        """
        from safetensors import safe_open

        if not self._files:  # process 0 sends its weights to the others, one at a time, and a tied one once
            weights: dict[str, Tensor] = {}
            if process_group.main:
                with no_bars():
                    model = self._kind.from_pretrained(self._folder, dtype=self._dtype, trust_remote_code=False)
                weights = model.state_dict()
            for name in {id(getattr(*slot)): name for name, slot in reversed(self._slots.items())}.values():
                process_group.copy_part(weights.pop(name, None), self._tensor(name), scatter=True)
            return
        state = {source: self._tensor(name) for name, source in self._sources.items()}
        try:
            read_tensors(state, self._folder, process_group)
            for first, (conversion, sources) in self._conversions.items():
                for source, pattern in sources:
                    with safe_open(self._files[source], "pt") as file:
                        tensor: Tensor = file.get_tensor(source)
                    tensor = tensor.to(self._dtype) if tensor.is_floating_point() else tensor
                    conversion.add_tensor(first, source, pattern, tensor)
                with torch.no_grad():
                    made = conversion.convert(first, model=self.model, config=self.model.config)
                for name, value in made.items():
                    process_group.copy_part(value[0] if isinstance(value, list) else value, self._tensor(name))
        except (OSError, ValueError, RuntimeError) as error:
            raise TrainError(f"the weights in {self._folder} cannot be read: {error}", kind="train_setup") from error

    def _tensor(self, name: str) -> Tensor:
        module, attribute = self._slots[name]
        tensor: Tensor = getattr(module, attribute)
        return tensor.detach()

    def _map_names(self) -> None:
        """Find the weight of each tensor, with transformers' own rules for the names in files."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

        mapping = get_model_conversion_mapping(self.model)
        renamings = [rule for rule in mapping if isinstance(rule, WeightRenaming)]
        converters = [rule for rule in mapping if isinstance(rule, WeightConverter)]
        by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
        weights = self.model.state_dict()
        for source in sorted(self._files, key=dot_natural_key):  # conversions join experts in this order: 10 after 9
            name, pattern = rename_source_key(source, renamings, converters, self.model.base_model_prefix, weights)
            if name not in weights and source in weights:
                name, pattern = source, None
            if name not in weights:
                continue
            if pattern is None:
                self._sources.setdefault(name, source)
            else:
                held = self._conversions.setdefault(name, (deepcopy(by_pattern[pattern]), []))
                held[1].append((source, pattern))
        self.model._weight_conversions = [rule for rule in mapping if rule.was_used()]
        named: dict[int, str] = {}  # a tied weight is read once
        for name in [name for name in self._slots if name in self._sources]:
            if named.setdefault(id(getattr(*self._slots[name])), name) != name:
                del self._sources[name]
        converted = {target for conversion, _ in self._conversions.values() for target in conversion.target_patterns}
        for name, slot in self._slots.items():
            parts = any(re.search(pattern, name) for pattern in converted) or name in self._conversions
            if id(getattr(*slot)) not in named and not parts:
                raise TrainError(
                    f"{self._folder} has no weight {name!r}, which {type(self.model).__name__} needs; use a complete "
                    "model folder as `model.path`",
                    kind="train_setup",
                )


def _slots(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """(module, attribute) of each parameter and each buffer that is saved, by name. Sharding and adapters keep these
    modules."""
    slots: dict[str, tuple[nn.Module, str]] = {}
    for path, module in model.named_modules():
        held = [name for name, tensor in module._parameters.items() if tensor is not None]
        held += [name for name in module._buffers if name not in module._non_persistent_buffers_set]
        slots |= {f"{path}.{name}" if path else name: (module, name) for name in held}
    return slots
