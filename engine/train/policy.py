"""The model that learns: log-probs of packs with their graph, its weights, its files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from engine.train.packing import Pack
from schemas.train import TrainSpec

if TYPE_CHECKING:
    from engine.tokens.vision import Vision


class Policy:
    """A causal model of transformers that learns. Made by `load`; belongs to one thread.

        policy = Policy.load(folder, spec, temperature=1.0, vocab=format.vocab_size, vision=format.vision)
        logprobs, entropy = policy.forward(pack, entropy=True)

    Log-probs are the sampler's: of softmax(logits / temperature) over the vocabulary without banned ids.
    """

    model: Any
    """The model of transformers (its linear layers wrapped, with LoRA)."""
    device: torch.device

    @classmethod
    def load(
        cls, folder: Path, spec: TrainSpec, *, temperature: float, vocab: int | None, vision: Vision | None
    ) -> Policy:
        """Load a model and prove that its packed pass gives what its own gives.

        Args:
            folder: The model's files: `resolve_model` finds them.
            spec: Precision, device, what is frozen, LoRA, memory.
            temperature: The sampler's; 0 counts as 1, as in the sampler.
            vocab: Ids from here on (a padded embedding's) are never sampled; None: all are.
            vision: The model's images; None where it sees none.

        Raises:
            TrainError: Kind `train_setup`: no such device, no model that can be trained here, or nothing left to train.
        """
        raise NotImplementedError

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """The trained parameters."""
        raise NotImplementedError

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """The trained parameters, for the optimizer."""
        raise NotImplementedError

    def forward(self, pack: Pack, *, entropy: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Log-probs of a pack's trained tokens, with their graph unless gradients are off.

        Returns:
            logprobs float32 [n], in the order of `pack.labels`; entropy of the distributions they are from, [n], or None.
        """
        raise NotImplementedError

    def reference(self, pack: Pack) -> torch.Tensor:
        """Log-probs [n] under the reference, without a graph: the adapter left out with LoRA, else the model as loaded.

        Raises:
            TrainError: There is none: `kl.coefficient` is 0 and there is no adapter.
        """
        raise NotImplementedError

    def weights(self) -> dict[str, torch.Tensor]:
        """All weights, detached, adapters merged, under the names that the model's files have. The model stays as it is."""
        raise NotImplementedError

    def save(self, folder: Path) -> None:
        """A complete folder that `model.path` can name: weights, configuration, tokenizer, processor."""
        raise NotImplementedError

    def save_adapter(self, folder: Path) -> None:
        """The LoRA adapter alone, as peft writes it.

        Raises:
            TrainError: There is no adapter.
        """
        raise NotImplementedError

    def state(self) -> dict[str, torch.Tensor]:
        """The trained parameters by name, detached, for a checkpoint."""
        raise NotImplementedError

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take back what `state` gave.

        Raises:
            TrainError: Kind `checkpoint`: names or shapes are not this model's.
        """
        raise NotImplementedError
