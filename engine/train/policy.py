"""The policy: the model that is trained. It computes log-probs of packs and gives its weights for syncs and
checkpoints."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Literal

import torch

from engine.backends.device import pick_device
from engine.errors import TrainError
from engine.schemas.train import TrainSpec
from engine.train.distributed import ProcessGroup
from engine.train.files import read_tensors, serving_dtypes, stored_names, under_file_names, write_model
from engine.train.packed_model import PackedModel
from engine.train.packing import Pack

if TYPE_CHECKING:
    from engine.tokens.vision import Vision


class Adapter(ABC):
    """What a plugin trains beside frozen weights (`AdapterSection`). It changes the model in place: layers are
    wrapped."""

    has_dropout: bool
    names: list[str]
    """The names in the model of its parameters."""

    @abstractmethod
    def dropout(self, on: bool) -> None:
        """Turn its dropout on or off."""

    @abstractmethod
    def disabled(self) -> AbstractContextManager[None]:
        """A context in which the model runs without it, and keeps what is frozen."""

    @abstractmethod
    def merged(self) -> dict[str, torch.Tensor]:
        """The model's weights with it merged in, under their names without it, each in its shape. The model is not
        changed."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write it in peft's format."""


class Policy:
    """A transformers causal model in training. Made by `load`. Not thread-safe.

        policy = Policy.load(folder, spec, temperature=1.0, vocab=format.vocab_size, vision=format.vision)
        logprobs, entropy = policy.forward(pack, entropy=True)

    Log-probs are those of the sampler's distribution: softmax(logits / temperature) over the vocabulary without banned
    ids. The only dropout is the adapter's, and only if gradients are enabled.
    """

    def __init__(self, net: PackedModel, adapter: Adapter | None, reference_model: PackedModel | None) -> None:
        """See `load`."""
        self.net, self.model, self.device = net, net.model, net.device
        self._adapter = adapter
        self.reference_model = reference_model
        """The model of the KL reference; None if there is none, or if it is the base model of an adapter."""
        self.trains_adapter = adapter is not None
        """Whether an adapter is trained, and the other weights are frozen."""
        self.can_share_prefixes = adapter is None or not adapter.has_dropout
        """Whether shared prefixes may be computed once. Not with dropout, which differs for each row."""

    @classmethod
    def load(
        cls,
        folder: Path,
        spec: TrainSpec,
        *,
        temperature: float,
        vocab: int | None,
        vision: Vision | None,
        process_group: ProcessGroup | None = None,
        replay_experts: bool = False,
    ) -> Policy:
        """Load a model and check that its packed forward pass gives the same log-probs as its own forward pass.

        With several processes the model is made without weights; `shard` reads them and checks the pass.

        Args:
            folder: Folder of the model's files (see `resolve_model`).
            spec: Precision, device, frozen parameters, LoRA, memory limits.
            temperature: The sampler's temperature; 0 counts as 1, as in the sampler.
            vocab: Ids from this one on (padding of the embedding) are never sampled. None: all ids can be sampled.
            vision: Image processing of the model; None for a text model.
            process_group: The processes of the training. Default: this one alone.
            replay_experts: Use the experts that the sampler chose (`routed_experts` of rows), also in the reference
                model.

        Raises:
            EngineError: torch does not have `train.device`.
            TrainError: kind `train_setup`: the model cannot be trained, or all of it is frozen.
        """

        open_net = partial(
            open_model,
            folder,
            spec,
            temperature=temperature,
            vocab=vocab,
            vision=vision,
            process_group=process_group,
            replay_experts=replay_experts,
        )
        net, adapter, reference_model = open_net(), None, None
        if spec.adapter is not None:
            adapter = resolve_name(spec.adapter.adapter)(net.model, spec.adapter, spec.seed)
        elif spec.kl.coefficient > 0:
            reference_model = open_net()
            reference_model.model.requires_grad_(False)
        policy = cls(net, adapter, reference_model)
        policy._freeze(spec.freeze)
        if spec.memory.gradient_checkpointing:
            enable_gradient_checkpointing(net.model)
        return policy

    def _freeze(self, patterns: list[str]) -> None:
        trained = {name for name, _ in self.named_parameters()}
        for pattern in patterns:
            matcher = re.compile(pattern)
            named = [parameter for name, parameter in self.model.named_parameters() if matcher.search(name)]
            if not named:
                raise TrainError(
                    f"`train.freeze`: {pattern!r} matches no parameter's name; an example of a name is "
                    f"{next(self.model.named_parameters())[0]!r}",
                    kind="train_setup",
                )
            if not any(matcher.search(name) for name in trained):
                raise TrainError(
                    f"`train.freeze`: {pattern!r} has no effect: with `train.lora` the weights that it matches are "
                    f"frozen already; an example of a trained weight is {min(trained)!r}",
                    kind="train_setup",
                )
            for parameter in named:
                parameter.requires_grad_(False)
        if not any(True for _ in self.named_parameters()):
            raise TrainError("`train.freeze` leaves nothing to train", kind="train_setup")

    def shard(self, *, offload: bool = False) -> None:
        """Shard the policy and its reference model (see `PackedModel.shard`). Parameters are others after this."""
        self.net.shard(offload=offload)
        if self.reference_model is not None:
            self.reference_model.shard(offload=offload)

    # --- parameters -----------------------------------------------------------------------------------------

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """The trained parameters with their names."""
        return (named for named in self.model.named_parameters() if named[1].requires_grad)

    # --- log-probs ------------------------------------------------------------------------------------------

    def forward(self, pack: Pack, *, entropy: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute the log-probs of a pack's trained tokens, with their graph if gradients are enabled.

        Returns:
            Log-probs, float32 [n], in the order of `pack.labels`, and entropies of their distributions, [n], or None.
        """
        return self.forward_with_states(pack, entropy=entropy, states=False)[:2]

    def forward_with_states(
        self, pack: Pack, *, entropy: bool, states: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """What `forward` returns, and the hidden states [n, H] before the trained tokens, with their graph, if `states`
        are asked for."""
        if self._adapter is not None:
            self._adapter.dropout(torch.is_grad_enabled())
        return self.net.logprobs(pack, entropy=entropy, states=states)

    def states(self, pack: Pack) -> torch.Tensor:
        """The hidden states before the pack's trained tokens, [n, H], without graph and dropout."""
        if self._adapter is not None:
            self._adapter.dropout(False)
        with torch.no_grad():
            return self.net.states(pack)

    def reference(self, pack: Pack) -> torch.Tensor:
        """Compute log-probs [n] of the reference model, without graph: the base model with LoRA, else the model as
        loaded.

        Raises:
            TrainError: kind `train_setup`: there is no reference, because `kl.coefficient` is 0 and no adapter is
                trained.
        """
        with torch.no_grad():
            if self._adapter is not None:
                with self._adapter.disabled():
                    return self.net.logprobs(pack, entropy=False)[0]
            if self.reference_model is None:
                raise TrainError("there is no reference model: `train.kl.coefficient` is 0", kind="train_setup")
            return self.reference_model.logprobs(pack, entropy=False)[0]

    # --- weights --------------------------------------------------------------------------------------------
    # With several processes, process 0 calls these and the others take part in `ProcessGroup.serve_calls`.

    def weights(
        self, names: Literal["files", "model"] = "files", *, dtype: torch.dtype | None = None
    ) -> dict[str, torch.Tensor]:
        """All weights, detached, with the adapter merged in. The model is not changed.

        Without LoRA these are the parameters themselves, which the next step changes. Copy them to keep them.

        Each weight has the shape of the model's parameter.

        Args:
            names: `files`: the names in the model's files, which servers use. `model`: the names in the transformers
                model, with tied weights under each of their names. For most models both are the same.
            dtype: Number type of weights that are gathered from several processes. Default: that of the model.
        """
        with self.net.process_group.full_parameters(self.net.model, dtype=dtype):
            state = self._adapter.merged() if self._adapter is not None else self.net.model.state_dict()
            return state if names == "model" else under_file_names(self.net.model, state, self.net.folder)

    def serving_weights(self) -> dict[str, torch.Tensor]:
        """All weights under the names in the model's files, in the number types in which a server keeps them.

        Each weight has the shape of the model's parameter. A parameter of another process is cast when it is gathered.
        """
        usual, in_float32 = serving_dtypes(self.net.folder)
        return {
            name: tensor.to(torch.float32 if name in in_float32 else usual or tensor.dtype)
            if tensor.is_floating_point()
            else tensor
            for name, tensor in self.weights(dtype=None if self.trains_adapter or in_float32 else usual).items()
        }

    def save(self, folder: Path, *, serving: bool = False) -> None:
        """Write a complete model folder: weights, configuration, tokenizer, processor.

        The folder gets its name when it is complete, and then replaces an older one. `serving`: the weights are written
        in the number types in which a server keeps them, else as they are trained.

        Raises:
            TrainError: kind `checkpoint`: it cannot be written.
        """
        write_model(self.serving_weights() if serving else self.weights(), self.net.folder, folder)

    def save_adapter(self, folder: Path) -> None:
        """Write the LoRA adapter in peft's format.

        Raises:
            TrainError: kind `train_setup`: no adapter is trained.
        """
        if self._adapter is None:
            raise TrainError("there is no adapter to save: the spec has no `train.lora`", kind="train_setup")
        with self.net.process_group.full_parameters(self.net.model, self._adapter.names):
            self._adapter.save(folder)

    def state(self) -> dict[str, torch.Tensor]:
        """The trained parameters by name, detached but not copied, for a checkpoint: this process's part of each.

        Each tensor has the shape of its parameter.
        """
        return {name: parameter.detach() for name, parameter in self.named_parameters()}

    def load_state(self, folder: Path, tensors: dict[str, torch.Tensor] | None = None) -> None:
        """Read the tensors of `state`, or their float32 copies, from files of `write_tensors`, each process its part.

        Args:
            folder: The folder of the files.
            tensors: What is read into, in the names and shapes of `state`. Default: `state`.

        Raises:
            TrainError: kind `checkpoint`: names or shapes differ from those of this model.
            ValueError, OSError: the files cannot be read.
        """
        targets, stored = tensors or self.state(), stored_names(folder)
        odd = sorted(targets.keys() ^ stored.keys())
        odd += [name for name in targets if name in stored and targets[name].shape != stored[name]]
        if odd:
            raise TrainError(
                f"the checkpoint belongs to another model, or to other settings of `lora` or `freeze`: {len(odd)} "
                f"parameters differ, for example {odd[0]!r}",
                kind="checkpoint",
            )
        read_tensors(targets, folder, self.net.process_group)


def enable_gradient_checkpointing(model: Any) -> None:
    """Make layers recompute activations. transformers does this only in training mode, so only these layers are put in
    it.

    Raises:
        TrainError: kind `train_setup`: the model cannot do that.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    if not model.supports_gradient_checkpointing:
        raise TrainError(
            f"{type(model).__name__} has no gradient checkpointing: set `train.memory.gradient_checkpointing: false`",
            kind="train_setup",
        )
    # Older versions of transformers have only the second name.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True  # only the layer itself: its submodules stay in evaluation mode


def open_model(
    folder: Path,
    spec: TrainSpec,
    *,
    temperature: float,
    vocab: int | None,
    vision: Vision | None,
    process_group: ProcessGroup | None = None,
    replay_experts: bool = False,
) -> PackedModel:
    """Load a model with the precision, device and memory limits of a spec. Arguments and errors as in `Policy.load`."""
    device = pick_device(spec.device, "train.device")
    precision = spec.precision_on(device.type)
    return PackedModel(
        folder,
        device=device,
        dtype=torch.bfloat16 if precision == "bfloat16" else torch.float32,
        autocast=torch.bfloat16 if precision == "mixed" else None,
        temperature=temperature,
        vocab=vocab,
        vision=vision,
        chunk_elements=spec.memory.logits_chunk_elements,
        process_group=process_group,
        replay_experts=replay_experts,
    )
