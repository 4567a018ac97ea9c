"""Bytes that one turn adds to the conversation of a live episode.

    python bench/turn_memory.py                              # 16 and 64 turns
    PYTHONPATH=OTHER_CHECKOUT python bench/turn_memory.py    # another revision, measured in the same way

A turn is a reply of 128 tokens with one tool call, in the workloads of calls.py, and the tool's result. Counted is what the conversation
alone keeps alive, by tracemalloc: its messages, threads, tapes and marks. Formats, templates and caches that all episodes share are filled by
a conversation before. No time is measured, so the figures do not depend on the machine.

    all        bytes a turn
    buffers    of these, ids and log-probs: the tape's arrays, with the room that they have to grow
    objects    all others: messages and their texts, spans, positions
    mark       bytes of the state after one more reply, which agent programs keep for each reply
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import tracemalloc
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/kit"))
sys.path.append(str(Path(__file__).parents[1]))  # behind a checkout that PYTHONPATH names

import numpy as np
from calls import WORKLOADS
from floor import Workload
from shipped_tokenizers import unpack

TOOL = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Work out a sum.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}


def played(form: Any, ids: list[int], turns: int) -> Any:
    """A conversation of so many turns, each answered by a tool."""
    from engine.schemas.generation import FinishReason, Generation, VersionSpan
    from engine.schemas.message import Message
    from engine.tokens.conversation import Conversation

    conversation = Conversation(form, [TOOL])
    conversation.open([Message(role="user", content="Use the tool for every step.")])
    for turn in range(turns):
        conversation.prompt()
        generation = Generation(
            output_ids=np.array(ids, np.int32),
            logprobs=np.full(len(ids), -0.5, np.float32),
            finish=FinishReason(type="stop"),
            versions=[VersionSpan(version=turn, start=0, end=len(ids))],
        )
        conversation.check(generation)
        conversation.reply(generation, turn)
        if turn + 1 < turns:
            result = f"It is {422 + turn}."
            conversation.add([Message(role="tool", content=result, name="calculate", tool_call_id=f"call_{turn}_0")])
    return conversation


def buffers(conversation: Any) -> int:
    """Bytes of the arrays of a conversation's tapes."""
    tapes = getattr(conversation.tapes, "all", conversation.tapes)  # pairs with reasons, in revisions before
    arrays = [tape if hasattr(tape, "ids") else tape[0] for tape in tapes]
    return sum(tape._ids.nbytes + tape._logprobs.nbytes for tape in arrays)


def grown(form: Any, ids: list[int], turns: int) -> tuple[int, int, int]:
    """Bytes of a conversation of so many turns, of its arrays, and of one mark."""
    gc.collect()
    before = tracemalloc.get_traced_memory()[0]
    conversation = played(form, ids, turns)
    gc.collect()
    after = tracemalloc.get_traced_memory()[0]
    mark = conversation.mark() if hasattr(conversation, "mark") else conversation.leaf()
    gc.collect()
    of_mark = tracemalloc.get_traced_memory()[0] - after
    assert mark is not None
    return after - before, buffers(conversation), of_mark


def main() -> None:
    parser = argparse.ArgumentParser(description="Bytes that one turn adds to the conversation of a live episode.")
    parser.add_argument("--turns", nargs="+", type=int, default=[16, 64])
    options = parser.parse_args()
    from tokenizers import Tokenizer

    from engine.schemas.model import ModelSpec
    from engine.tokens.loading import load_format

    with tempfile.TemporaryDirectory() as folder:
        model = unpack("qwen3", Path(folder) / "model")
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        form = load_format(ModelSpec(path=str(model)), Path())
        print("workload  turns      all  buffers  objects     mark   (bytes a turn; bytes)")
        for name, text in WORKLOADS.items():
            ids = Workload.of(tokenizer).reply
            if text is not None:
                ids = tokenizer.encode(f"{text}<|im_end|>", add_special_tokens=False).ids
            for turns in options.turns:
                played(form, ids, turns)
                tracemalloc.start()
                empty, *_ = grown(form, ids, 1)
                everything, arrays, mark = grown(form, ids, turns)
                tracemalloc.stop()
                more = turns - 1
                print(
                    f"{name:<9} {turns:5d} {(everything - empty) / more:8.0f} {arrays / turns:8.0f} "
                    f"{(everything - empty) / more - arrays / turns:8.0f} {mark:8d}"
                )


if __name__ == "__main__":
    main()
