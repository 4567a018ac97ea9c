"""One of several processes that load a model and its reference: prints how many bytes of tensors it holds, and held at most."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from process_group_worker import learner_of

from engine.plugins.plan.planned_step import AllocatedBytes
from engine.train.distributed import ProcessGroup, join_process_group

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    process_group = join_process_group()
    assert type(process_group) is not ProcessGroup
    with AllocatedBytes() as held:
        learner = learner_of(process_group, folder / "model", "kl")
    held_of_all = process_group.all_gather((held.now, held.peak))
    if process_group.main:
        whole = 4 * sum(each.numel() for each in learner.policy.model.parameters())
        (folder / "held.json").write_text(json.dumps({"held": held_of_all, "whole": whole}))
        process_group.close()
    else:
        learner.follow()
