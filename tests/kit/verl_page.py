"""The example of docs/from-trainers.md up to its advantages: run by a Python that has verl, in the folder of the example's files."""

from __future__ import annotations

import json
import os
import re
import sys
from typing import Any

from verl_training import composed, run_batch


class Solver:
    """Stands for verl's servers: an episode calls the tool, and answers after its result; every third one is wrong at first."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.calls: list[dict[str, Any]] = []
        self.version = 4

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any
    ) -> Any:
        from verl.workers.rollout.replica import TokenOutput

        self.calls.append({"request": request_id, **sampling_params})
        text = self._tokenizer.decode(prompt_ids)
        results = text.count("<tool_response>")
        wrong = int(request_id.rpartition("/")[2]) % 3 == 0
        found = re.search(r"(\d+)\+(\d+)", text)
        assert found is not None
        right = str(int(found[1]) + int(found[2]))
        call = {"name": "calc_gsm8k_reward", "arguments": {"answer": "0" if wrong and not results else right}}
        said = f"<tool_call>\n{json.dumps(call)}\n</tool_call>" if results < 1 + wrong else f"#### {right}"
        ids = self._tokenizer.encode(said + "<|im_end|>", add_special_tokens=False)
        return TokenOutput(
            token_ids=ids,
            log_probs=[-0.25 * (1 + place % 4) for place in range(len(ids))],
            stop_reason="completed",
            extra_fields=dict.fromkeys(("global_steps", "min_global_steps", "max_global_steps"), self.version),
        )


def main(words: str) -> None:
    """Run one batch of the example.

    Args:
        words: JSON, the settings of the page's command.
    """
    from verl.trainer.main_ppo import validate_config
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.trainer.ppo.v1 import get_trainer_cls
    from verl.utils import hf_tokenizer
    from verl.utils.dataset.rl_dataset import RLHFDataset

    from engine.plugins.trainers.verl.manager import write_tasks

    config = composed(json.loads(words))
    validate_config(config, need_reference_policy(config), need_critic(config))
    assert get_trainer_cls("engine").__name__ == "EnginePPOTrainer"  # by VERL_USE_EXTERNAL_MODULES
    write_tasks("spec.yaml", "tasks.parquet")
    tokenizer = hf_tokenizer(config.actor_rollout_ref.model.path)
    data = RLHFDataset(config.data.train_files, tokenizer, config.data)
    run_batch(config, Solver(tokenizer), [data[place] for place in range(len(data))])


if __name__ == "__main__":
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    main(*sys.argv[1:])
