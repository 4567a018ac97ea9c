"""TRL's GRPOTrainer with the engine's rows: advantages by token, the sampler's log-probs, images of any turn.

Written for TRL 1.16. Four methods of GRPOTrainer are extended: `_generate_and_score_completions` (the batch of one
generation), `_prepare_inputs` (its slices; the sums are compared here), `_compute_loss` (the loss of a slice) and
`_get_per_token_logps_and_entropies` (log-probs over the ids that can be sampled).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from engine.errors import TrainError
from engine.plugins.trainers.handover import BatchSums, padded
from engine.plugins.trainers.library import overrides
from engine.plugins.trainers.pixels import checksum, checksums_of, row_sum
from engine.plugins.trainers.trl.arguments import refuse_arguments
from engine.train.logprobs import MASKED_LOGIT

if TYPE_CHECKING:
    from engine.plugins.trainers.trl.rollouts import EngineRollouts

_PATCHES, _TILES = {"pixel_values", "image_grid_thw"}, {"pixel_values", "pixel_attention_mask"}
"""The tensors of images that TRL splits by row: of Qwen's families, and of Idefics3's."""
_IMAGE_TENSORS = ("pixel_values", "image_grid_thw", "pixel_attention_mask")
_IMAGE_KEYS = _PATCHES | _TILES | {"num_images"}


def engine_reward(prompts: list[Any], completions: list[Any], engine_reward: list[float | None], **_: Any) -> list[Any]:
    """The sum of an episode's rewards, for TRL's metrics; the loss reads the engine's advantages. None: the engine
    failed."""
    return engine_reward


class EngineGRPO:
    """The methods that `EngineGRPOTrainer` adds to TRL's GRPOTrainer.

    Args:
        rollouts: The episodes.
        args: TRL's `GRPOConfig`; `grpo_arguments` makes its values from the spec.
        model: A model that is already loaded from the spec's `model.path`, or its folder. Default: TRL loads it.
        options: Other arguments of `GRPOTrainer`, such as `callbacks`.

    Raises:
        TrainError: kind `train_setup`: an argument would change the engine's rows, or have no effect.
    """

    def __init__(self, rollouts: EngineRollouts, args: Any, *, model: Any = None, **options: Any) -> None:
        from datasets import Dataset
        from transformers import AutoTokenizer

        refuse_arguments(args, options, rollouts.loaded, vision=rollouts.format.vision is not None)
        self._rollouts = rollouts
        self._newest: torch.Tensor | None = None
        self._unchecked = False
        options.setdefault("processing_class", AutoTokenizer.from_pretrained(rollouts.model_folder))
        super().__init__(  # type: ignore[call-arg]
            model=str(rollouts.model_folder) if model is None else model,
            args=args,
            reward_funcs=engine_reward,
            train_dataset=Dataset.from_dict({"prompt": rollouts.tasks}),
            rollout_func=rollouts,
            **options,
        )

    _metrics: Any
    state: Any
    max_completion_length: float | None
    """The constant of `dr_grpo`."""

    @overrides("inputs")
    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        """Make the batch of a generation: TRL's, with the engine's advantages, log-probs and images."""
        batch: dict[str, Any] = super()._generate_and_score_completions(inputs)  # type: ignore[misc]
        rows = self._rollouts.handed
        completion = batch["completion_ids"]
        batch["advantages"] = padded([row.advantages for row in rows], completion.shape[1]).to(completion.device)
        # TRL's own old log-probs, if it computed them, are of a pass without images.
        batch["old_per_token_logps"] = padded([row.logprobs for row in rows], completion.shape[1]).to(completion.device)
        if images := self._images(batch):
            batch |= images
            sums = zip(rows, checksums_of_rows(images), strict=True)
            shown = sum(row_sum([*row.prompt_ids, *row.completion_ids], checksums) for row, checksums in sums)
            self._rollouts.sums = replace(self._rollouts.sums, images=shown)
        if self.max_completion_length is None:
            self.max_completion_length = self._rollouts.mean_length()
        for name, value in self._rollouts.metrics.items():
            self._metrics["train"][name].append(value)
        self._unchecked = True
        return batch

    def _images(self, batch: dict[str, Any]) -> dict[str, Any]:
        """The tensors of the rows' images; none if no row has an image.

        Raises:
            TrainError: kind `train_setup`: TRL cannot split this family's tensors by row.
        """
        digests = [row.images for row in self._rollouts.handed]
        vision = self._rollouts.format.vision
        if vision is None or not any(digests):
            return {}
        tensors = vision.tensors(digests)
        if set(tensors) not in (_PATCHES, _TILES):
            raise TrainError(
                f"TRL cannot split the image tensors of this model by row ({', '.join(sorted(tensors))}); use a model "
                "of Qwen's or Idefics3's families, or `engine train`",
                kind="train_setup",
            )
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
        tensors_of_rows: dict[str, Any] = {
            name: torch.from_numpy(array).to(ids.device) for name, array in tensors.items()
        }
        if set(tensors) == _TILES:
            # One entry for each row: TRL takes entries for images where there are as many, so a row counts as one.
            return tensors_of_rows | {"num_images": [1] * len(digests)}
        tensors_of_rows["num_images"] = [len(images) for images in digests]
        tensors_of_rows["mm_token_type_ids"] = torch.tensor(vision.token_types(ids.tolist()), device=ids.device)
        return tensors_of_rows

    @overrides("generation_batch")
    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        """Return the next slice; after a generation, compare the sums of all slices with those of the engine's rows.

        Raises:
            TrainError: kind `handover`: they differ. No update is made with the batch.
        """
        inputs: dict[str, Any] = super()._prepare_inputs(generation_batch)  # type: ignore[misc]
        if self._unchecked:
            self._unchecked = False
            check_batches(self._rollouts.sums, self._buffered_inputs)  # type: ignore[attr-defined]
        return inputs

    @overrides(
        "model, input_ids, attention_mask, logits_to_keep, batch_size, compute_entropy, compute_aux_loss, "
        "pixel_values, image_grid_thw, num_images, pixel_attention_mask, spatial_shapes, num_tiles, image_sizes, "
        "token_type_ids, mm_token_type_ids, image_position_ids"
    )
    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **options: Any) -> Any:
        """Compute log-probs over the ids that the sampler may choose, as it does."""
        head = self.accelerator.unwrap_model(model).get_output_embeddings()  # type: ignore[attr-defined]
        chat = self._rollouts.format
        with _excluded(head, chat.vocab_size, chat.vision.banned if chat.vision is not None else []):
            computed = super()._get_per_token_logps_and_entropies(model, *args, **options)  # type: ignore[misc]
        self._newest = computed[0].detach()
        return computed

    @overrides("model, inputs")
    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        """Compute TRL's loss; before the first update with a batch, measure how far its log-probs are from the
        sampler's."""
        if "num_images" in inputs and not inputs.get("pixel_attention_mask", inputs["pixel_values"]).any():
            inputs = {name: value for name, value in inputs.items() if name not in _IMAGE_KEYS}
        loss = super()._compute_loss(model, inputs)  # type: ignore[misc]
        if self._newest is not None and self.state.global_step == self._rollouts.version:
            trained = (inputs["completion_mask"] * inputs["tool_mask"]).bool()
            apart = (self._newest - inputs["old_per_token_logps"]).abs()[trained]
            if len(apart):
                self._metrics["train"]["sampler/diff_mean"].append(float(apart.mean()))
                self._metrics["train"]["sampler/diff_max"].append(float(apart.max()))
        return loss


@contextmanager
def _excluded(head: Any, vocab: int, banned: list[int]) -> Iterator[None]:
    """Inside the block the output layer gives ids that are never sampled no probability.

    No sampled token lowers their logits, so they would get more probability in each update. TRL multiplies by the
    layer's weight itself and adds its bias, so they are excluded by one. A layer that has a bias stays as it is, since
    its bias may be trained. Rows of `weight` from `vocab` on belong to no token.
    """
    weight = head.weight
    if head.bias is not None or (vocab >= len(weight) and not banned):
        yield
        return
    bias = torch.zeros(len(weight), dtype=weight.dtype, device=weight.device)
    bias[vocab:] = MASKED_LOGIT
    bias[banned] = MASKED_LOGIT
    head.bias = torch.nn.Parameter(bias, requires_grad=False)
    try:
        yield
    finally:
        head.bias = None


def check_batches(rows: BatchSums, batches: Sequence[Mapping[str, Any]]) -> None:
    """Compare the engine's sums with those of what TRL's loss reads, over all slices of one generation.

    Raises:
        TrainError: kind `handover`: they differ.
    """
    slices = []
    for batch in batches:
        mask = batch["completion_mask"] * batch.get("tool_mask", 1)
        advantages = batch["advantages"]
        if advantages.dim() == 1:
            advantages = advantages[:, None]
        images = 0
        if "num_images" in batch:
            ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1).cpu()
            there = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1).bool().cpu()
            shown = zip(ids, there, checksums_of_rows(batch), strict=True)
            images = sum(row_sum(row[places], checksums) for row, places, checksums in shown)
        tokens = int(batch["prompt_mask"].sum() + batch["completion_mask"].sum())
        slices.append(BatchSums.of_tensors(tokens, mask, advantages, images))
    rows.check(
        BatchSums.total(slices), "TRL", "an overridden method, an option of GRPOConfig that masks or cuts completions"
    )


def checksums_of_rows(batch: Mapping[str, Any]) -> list[list[int]]:
    """`checksum` of each image of each row, or of all tiles of a row together."""
    tensors = {name: batch[name].cpu() for name in _IMAGE_TENSORS if name in batch}
    if "image_grid_thw" not in tensors:
        return [[checksum(dict(zip(tensors, row, strict=True)))] for row in zip(*tensors.values(), strict=True)]
    checksums = iter(checksums_of(tensors))
    return [[next(checksums) for _ in range(count)] for count in batch["num_images"]]
