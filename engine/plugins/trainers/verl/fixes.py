"""Repairs of verl 0.9.1 that rows with images need. `trainer.py` applies them, in each process that
VERL_USE_EXTERNAL_MODULES names it in.

- Position ids with four lines. Rows that come back from TransferQueue with one length, or alone, are cut along the
  wrong dimension, and `maybe_fix_3d_position_ids` only renames it.
- Rows without an image, where a forward pass has no other: verl's stand-in image of Qwen2-VL and Qwen2.5-VL does not
  fit transformers 5.
- Agent loops. Their workers decode the ids and run the processor again; the images and positions of the engine's
  loop are taken as they are.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

from engine.errors import TrainError

IMAGES = "engine"
"""The key of `AgentLoopOutput.multi_modal_data` that holds a row's `RowImages`, with its positions as an attribute."""


def fix_positions(data: Any) -> None:
    """Restore the column `position_ids`, [rows, 4, tokens] with rows of different lengths, of a TensorDict from
    TransferQueue."""
    from verl.utils.tensordict_utils import nested_tensor_from_tensor_list

    column = data.get("position_ids", None)
    if column is None or not column.is_nested or column.dim() != 3:
        return
    values, steps = column.values(), column.offsets().diff()
    if (steps == 4).all() and values.shape[0] == 4 * len(steps) and values.shape != (4, 4):
        data["position_ids"] = nested_tensor_from_tensor_list(list(values.split(4)), ragged_idx=2)
    else:
        column._ragged_idx = 2  # a pickle loses it


def apply() -> None:
    """Repair verl in this process. Later calls do nothing."""
    from verl.experimental.agent_loop import AgentLoopWorker
    from verl.models.transformers import qwen2_vl
    from verl.utils import tensordict_utils

    name, broken = "maybe_fix_3d_position_ids", tensordict_utils.maybe_fix_3d_position_ids
    if broken is fix_positions:
        return
    for module in list(sys.modules.values()):  # modules of verl import it by name
        if getattr(module, "__dict__", {}).get(name) is broken:
            setattr(module, name, fix_positions)
    embeds = qwen2_vl._get_input_embeds

    def embeds_of(model: Any, ids: Any, mask: Any, pixels: Any, videos: Any, *grids: Any) -> Any:
        if pixels is not None or videos is not None:
            return embeds(model, ids, mask, pixels, videos, *grids)
        words, vision = model.get_input_embeddings()(ids), model.config.vision_config
        side = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        seen = model.visual(words.new_zeros((16, side)), grid_thw=ids.new_tensor([[1, 4, 4]]))
        return words + 0.0 * qwen2_vl.unpack_visual_output(seen)[0].mean(), mask

    qwen2_vl._get_input_embeds = embeds_of
    inputs, positions = AgentLoopWorker._compute_multi_modal_inputs, AgentLoopWorker._compute_position_ids

    def images_of(self: Any, output: Any, input_ids: torch.Tensor) -> Any:
        images = (output.multi_modal_data or {}).get(IMAGES)
        return inputs(self, output, input_ids) if images is None else images

    def positions_of(self: Any, ids: Any, mask: Any, images: Any, *args: Any) -> Any:
        places = getattr(images, "__dict__", {}).pop("positions", None)  # the queue has them in their own column
        return positions(self, ids, mask, images, *args) if places is None else places[None]

    workers = [AgentLoopWorker]
    if (actor := sys.modules.get("verl.trainer.ppo.v1.agent_loop_tq")) is not None:
        # Ray has copied the methods of its base class.
        workers.append(actor.AgentLoopWorkerTQ.__ray_metadata__.modified_class)
    for worker in workers:
        worker._compute_multi_modal_inputs, worker._compute_position_ids = images_of, positions_of


def check_applied() -> None:
    """Check that verl is repaired in this process. Raises: TrainError: kind `train_setup`: it is not."""
    from verl.utils import tensordict_utils

    if tensordict_utils.maybe_fix_3d_position_ids is not fix_positions:
        raise TrainError(
            f"rows with images need a repair of verl in each of its processes, and VERL_USE_EXTERNAL_MODULES is "
            f"{os.environ.get('VERL_USE_EXTERNAL_MODULES', '')!r}; export "
            "VERL_USE_EXTERNAL_MODULES=engine.plugins.trainers.verl.trainer on all nodes before Ray starts",
            kind="train_setup",
        )
