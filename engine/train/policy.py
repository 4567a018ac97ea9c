"""The model that learns: log-probs of packs with their graph, its weights, its files."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from engine.errors import TrainError
from engine.schemas.train import TrainSpec
from engine.train import files
from engine.train.net import PackedModel
from engine.train.packing import Pack

if TYPE_CHECKING:
    from engine.tokens.vision import Vision
    from engine.train.lora import Adapter


class Policy:
    """A causal model of transformers that learns. Made by `load`; belongs to one thread.

        policy = Policy.load(folder, spec, temperature=1.0, vocab=format.vocab_size, vision=format.vision)
        logprobs, entropy = policy.forward(pack, entropy=True)

    Log-probs are the sampler's: of softmax(logits / temperature) over the vocabulary without banned ids. There is no
    dropout but the adapter's, and that only where gradients are on.
    """

    def __init__(self, net: PackedModel, adapter: Adapter | None, reference_model: PackedModel | None) -> None:
        """See `load`."""
        self.net = net
        self._adapter = adapter
        self._reference_model = reference_model

    @classmethod
    def load(
        cls, folder: Path, spec: TrainSpec, *, temperature: float, vocab: int | None, vision: Vision | None
    ) -> Policy:
        """Load a model and prove that its packed pass gives what its own gives.

        Args:
            folder: The model's files: `resolve_model` finds them.
            spec: Precision, device, what is reference_model, LoRA, memory.
            temperature: The sampler's; 0 counts as 1, as in the sampler.
            vocab: Ids from here on (a padded embedding's) are never sampled; None: all are.
            vision: The model's images; None where it sees none.

        Raises:
            TrainError: Kind `train_setup`: no such device, no model that can be trained here, or nothing left to train.
        """

        def open_net() -> PackedModel:
            return PackedModel(
                folder,
                device=pick_device(spec.device),
                dtype=torch.bfloat16 if spec.precision == "bfloat16" else torch.float32,
                autocast=torch.bfloat16 if spec.precision == "mixed" else None,
                temperature=temperature,
                vocab=vocab,
                vision=vision,
                chunk_elements=spec.memory.logits_chunk_elements,
            )

        net, adapter, reference_model = open_net(), None, None
        if spec.lora is not None:
            from engine.train.lora import Adapter

            adapter = Adapter(net.model, spec.lora, spec.seed)
        elif spec.kl.coefficient > 0:
            reference_model = open_net()
            reference_model.model.requires_grad_(False)
        policy = cls(net, adapter, reference_model)
        policy._freeze(spec.freeze)
        if spec.memory.gradient_checkpointing:
            policy._enable_gradient_checkpointing()
        return policy

    def _freeze(self, patterns: list[str]) -> None:
        for pattern in patterns:
            found = re.compile(pattern)
            named = [parameter for name, parameter in self.net.model.named_parameters() if found.search(name)]
            if not named:
                raise TrainError(
                    f"`train.freeze`: no parameter's name has {pattern!r} in it; names look like "
                    f"{next(self.net.model.named_parameters())[0]!r}",
                    kind="train_setup",
                )
            for parameter in named:
                parameter.requires_grad_(False)
        if not any(True for _ in self.parameters()):
            raise TrainError("`train.freeze` leaves nothing to train", kind="train_setup")

    def _enable_gradient_checkpointing(self) -> None:
        """Layers compute their activations again. They do so in training mode alone, which they alone are put into."""
        from transformers.modeling_layers import GradientCheckpointingLayer

        model = self.net.model
        if not model.supports_gradient_checkpointing:
            raise TrainError(
                f"{type(model).__name__} has no gradient checkpointing: `train.memory.gradient_checkpointing: false`",
                kind="train_setup",
            )
        # Older versions of transformers have the second name alone.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
        for module in model.modules():
            if isinstance(module, GradientCheckpointingLayer):
                module.training = True  # of the layer itself: what is inside stays in evaluation mode

    # --- what is learnt -------------------------------------------------------------------------------------

    @property
    def model(self) -> Any:
        """The model of transformers (its linear layers wrapped, with LoRA)."""
        return self.net.model

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return self.net.device

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """The trained parameters."""
        for name, parameter in self.net.model.named_parameters():
            if parameter.requires_grad:
                yield name, parameter

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """The trained parameters, for the optimizer."""
        for _, parameter in self.named_parameters():
            yield parameter

    @property
    def can_share_prefixes(self) -> bool:
        """Whether what rows share may be computed once: not where each row has dropout of its own."""
        return self._adapter is None or not self._adapter.has_dropout

    # --- log-probs ------------------------------------------------------------------------------------------

    def forward(self, pack: Pack, *, entropy: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Log-probs of a pack's trained tokens, with their graph unless gradients are off.

        Returns:
            logprobs float32 [n], in the order of `pack.labels`; entropy of the distributions they are from, [n], or None.
        """
        if self._adapter is not None:
            self._adapter.dropout(torch.is_grad_enabled())
        return self.net.logprobs(pack, entropy=entropy)

    def reference(self, pack: Pack) -> torch.Tensor:
        """Log-probs [n] under the reference, without a graph: the adapter left out with LoRA, else the model as loaded.

        Raises:
            TrainError: There is none: `kl.coefficient` is 0 and there is no adapter.
        """
        with torch.no_grad():
            if self._adapter is not None:
                with self._adapter.disabled():
                    return self.net.logprobs(pack, entropy=False)[0]
            if self._reference_model is None:
                raise TrainError("no reference was kept: `train.kl.coefficient` is 0", kind="train_setup")
            return self._reference_model.logprobs(pack, entropy=False)[0]

    # --- weights --------------------------------------------------------------------------------------------

    def weights(self, names: Literal["files", "model"] = "files") -> dict[str, torch.Tensor]:
        """All weights, detached, adapters merged; the model stays as it is.

        Without LoRA these are the parameters themselves, which the next step changes: copy what has to last.

        Args:
            names: `files`: as the model's folder has them, which servers read. `model`: as transformers' model in
                memory has them, tied ones under each of their names; most models have the same.
        """
        state = self._adapter.merged() if self._adapter is not None else self.net.model.state_dict()
        return state if names == "model" else files.under_file_names(self.net.model, state, self.net.folder)

    def save(self, folder: Path) -> None:
        """A complete folder that `model.path` can name: weights, configuration, tokenizer, processor.

        It appears under its name when it is complete, in the place of an older one.

        Raises:
            TrainError: Kind `checkpoint`: it cannot be written.
        """
        files.write_model(self.weights(), self.net.folder, folder)

    def save_adapter(self, folder: Path) -> None:
        """The LoRA adapter alone, as peft writes it.

        Raises:
            TrainError: There is no adapter.
        """
        if self._adapter is None:
            raise TrainError("there is no adapter to save: the spec has no `train.lora`", kind="train_setup")
        self._adapter.save(folder)

    def state(self) -> dict[str, torch.Tensor]:
        """The trained parameters by name, detached, for a checkpoint: not copied."""
        return {name: parameter.detach() for name, parameter in self.named_parameters()}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take back what `state` gave.

        Raises:
            TrainError: Kind `checkpoint`: names or shapes are not this model's.
        """
        own = dict(self.named_parameters())
        odd = sorted(own.keys() ^ state.keys())
        odd += [name for name in own if name in state and own[name].shape != state[name].shape]
        if odd:
            raise TrainError(
                f"the checkpoint is of another model, or of another `lora` or `freeze`: {len(odd)} parameters differ, "
                f"such as {odd[0]!r}",
                kind="checkpoint",
            )
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(state[name])


def pick_device(name: str) -> torch.device:
    """`auto` is the first CUDA device where there is one, else the CPU.

    Raises:
        TrainError: There is no such device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise TrainError(
            f"`train.device: {name}` is no device: write auto, cpu, cuda or cuda:1", kind="train_setup"
        ) from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise TrainError(
            f"`train.device: {name}`, but torch sees no CUDA device: write cpu or auto", kind="train_setup"
        )
    return device
