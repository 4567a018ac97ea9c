"""Starts SGLang's server with its torch-native attention admitted to deterministic inference.

SGLang lists the attention backends that it vouches for under `--enable-deterministic-inference`, and
offers a function by which others join; on one CPU in float32 the torch-native one qualifies for what
the flag is needed for here: without it a request's `sampling_seed` is ignored.
"""

from __future__ import annotations

import os
import sys


def main() -> None:
    from sglang.srt.arg_groups.choices import (
        add_deterministic_attention_backend_choices,
        add_radix_supported_deterministic_attention_backend_choices,
    )
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    add_deterministic_attention_backend_choices(["torch_native"])
    add_radix_supported_deterministic_attention_backend_choices(["torch_native"])
    from sglang.launch_server import run_server

    arguments = prepare_server_args(sys.argv[1:])
    try:
        run_server(arguments)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main()
