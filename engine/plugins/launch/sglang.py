"""The commands that start SGLang servers for `backend.launch`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from engine.backends.sglang.checks import EXPERTS_FLAG
from engine.plugins.launch.servers import LaunchedServers, server_commands
from engine.tokens.catalogue import resolve_model

if TYPE_CHECKING:
    from engine.schemas.backend import LaunchSpec, SGLangBackendSpec
    from engine.schemas.train import AdapterSection, TrainSpec
    from engine.spec.load import LoadedSpec


def launch(spec: SGLangBackendSpec, loaded: LoadedSpec) -> LaunchedServers:
    """The launcher of `kind: sglang`."""
    assert spec.launch is not None
    model = loaded.spec.model
    folder = resolve_model(model.path, model.revision, loaded.base)
    return launched_servers(spec.launch, folder, loaded.spec.train, experts=spec.asks_experts)


def launched_servers(
    launch: LaunchSpec, folder: Path, train: TrainSpec | None, *, experts: bool = False
) -> LaunchedServers:
    """The servers of a spec, not yet started.

    Args:
        launch: GPUs, arguments, interpreter.
        folder: The model's files.
        train: The training; its servers are started so that they take its adapter, and release their memory to it.
        experts: Whether the servers report the experts of each token.
    """
    added: list[str] = []
    if experts and EXPERTS_FLAG not in launch.args:
        added.append(EXPERTS_FLAG)
    if train is not None and train.adapter is not None and "--enable-lora" not in launch.args:
        added += ["--enable-lora", *lora_arguments(train.adapter)]
    if train is not None and train.colocate and "--enable-memory-saver" not in launch.args:
        added.append("--enable-memory-saver")
    python = launch.python or sys.executable

    def command(port: int) -> list[str]:
        return [
            *(
                python,
                "-m",
                "sglang.launch_server",
                "--model-path",
                str(folder),
                "--host",
                "127.0.0.1",
                "--port",
                str(port),
            ),
            *(["--tp-size", str(launch.tp)] if launch.tp > 1 else []),
            *added,
            *launch.args,
        ]

    commands = server_commands(command, launch.indexes, launch.tp, launch.env)
    return LaunchedServers(commands, ready_timeout=launch.ready_timeout, restarts=launch.restarts)


def lora_arguments(lora: AdapterSection) -> list[str]:
    """SGLang's flags for an adapter of this rank and these layers."""
    targets = ["all"] if lora.target_modules == "all-linear" else lora.target_modules
    return ["--max-lora-rank", str(lora.rank), "--lora-target-modules", *targets]
