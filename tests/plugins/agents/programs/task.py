"""What the programs of the packages share: their task, its tool, and their reward."""

import json
import os
from pathlib import Path

QUESTION = json.loads(os.environ["EPISODE_TASK"])["fields"]["question"]
MODEL = os.environ["OPENAI_MODEL"]


def add(a: int, b: int) -> str:
    """Adds.

    Args:
        a: A number.
        b: Another number.
    """
    return str(a + b)


def reward(value: float = 1.0) -> None:
    Path(os.environ["EPISODE_REWARD_FILE"]).write_text(json.dumps(value))
