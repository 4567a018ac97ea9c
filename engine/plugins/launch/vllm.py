"""The commands that start vLLM servers for `backend.launch`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from engine.plugins.launch.servers import LaunchedServers, server_commands
from engine.schemas.backend import changes_distribution
from engine.tokens.catalogue import resolve_model

if TYPE_CHECKING:
    from engine.schemas.backend import LaunchSpec, ServersSpec
    from engine.schemas.generation import SamplingParams
    from engine.spec.load import LoadedSpec


def launch(spec: ServersSpec, loaded: LoadedSpec) -> LaunchedServers:
    """The launcher of `kind: vllm`."""
    assert spec.launch is not None
    model = loaded.spec.model
    return launched_servers(spec.launch, resolve_model(model.path, model.revision, loaded.base), loaded.spec.sampling)


def launched_servers(launch: LaunchSpec, folder: Path, sampling: SamplingParams) -> LaunchedServers:
    """The servers of a spec, not yet started.

    Args:
        launch: GPUs, arguments, interpreter.
        folder: The model's files.
        sampling: The spec's sampling; servers are started so that they report its log-probs.
    """
    added: list[str] = []
    if changes_distribution(sampling) and not any(arg.startswith("--logprobs-mode") for arg in launch.args):
        added += ["--logprobs-mode", "processed_logprobs"]

    def command(port: int) -> list[str]:
        return [
            *(launch.python or sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(folder)),
            *("--host", "127.0.0.1", "--port", str(port)),
            *(["--tensor-parallel-size", str(launch.tp)] if launch.tp > 1 else []),
            *added,
            *launch.args,
        ]

    commands = server_commands(command, launch.indexes, launch.tp, launch.env)
    return LaunchedServers(commands, ready_timeout=launch.ready_timeout, restarts=launch.restarts)
