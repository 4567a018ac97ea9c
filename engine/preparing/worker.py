"""A worker process: reads jobs as lines of JSON from its input, and writes their results. It ends when its input ends.

The first line names the function and what all jobs share: `{"call": "package.module:function", "common": …}`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from importlib import import_module
from typing import Any


def main() -> None:
    """Do jobs until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one decides when it ends
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what imported code prints is not an answer
    first = json.loads(sys.stdin.buffer.readline())
    module, _, name = first["call"].partition(":")
    call: Any = None
    for line in sys.stdin.buffer:
        try:
            if call is None:
                call = getattr(import_module(module), name)
            answer = {"result": call(first["common"], json.loads(line))}
            text = json.dumps(answer)
        except Exception as error:  # noqa: BLE001 - the job is done again in the process that asked, which raises it
            text = json.dumps({"error": f"{type(error).__name__}: {error}"})
        answers.write(text.encode() + b"\n")
        answers.flush()


if __name__ == "__main__":
    main()
