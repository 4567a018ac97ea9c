"""The commands that start SGLang and vLLM servers for `backend.launch`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from engine.plugins.launch.servers import LaunchedServer, ServerProcesses
from engine.schemas.backend import changes_distribution
from engine.tokens.catalogue import resolve_model

if TYPE_CHECKING:
    from engine.schemas.backend import LaunchSpec, ServersSpec
    from engine.schemas.generation import SamplingParams
    from engine.schemas.train import TrainSpec
    from engine.spec.load import LoadedSpec


def launch_sglang(spec: ServersSpec, loaded: LoadedSpec) -> ServerProcesses:
    """The launcher of `kind: sglang`."""
    assert spec.launch is not None
    model = loaded.spec.model
    folder = resolve_model(model.path, model.revision, loaded.base)
    return sglang_servers(spec.launch, folder, loaded.spec.train, experts=spec.asks_experts)


def sglang_servers(
    launch: LaunchSpec, folder: Path, train: TrainSpec | None, *, experts: bool = False
) -> ServerProcesses:
    """SGLang servers, not yet started.

    Args:
        launch: GPUs, arguments, interpreter.
        folder: The model's files.
        train: The training; its servers are started so that they take its adapter, and release their memory to it.
        experts: Whether the servers report the experts of each token.
    """
    added: list[str] = []
    if experts and "--enable-return-routed-experts" not in launch.args:
        added.append("--enable-return-routed-experts")
    if train is not None and (lora := train.adapter) is not None and "--enable-lora" not in launch.args:
        targets = ["all"] if lora.target_modules == "all-linear" else lora.target_modules
        added += ["--enable-lora", "--max-lora-rank", str(lora.rank), "--lora-target-modules", *targets]
    if train is not None and train.colocate and "--enable-memory-saver" not in launch.args:
        added.append("--enable-memory-saver")
    return _servers(launch, ["-m", "sglang.launch_server", "--model-path", str(folder)], "--tp-size", added)


def launch_vllm(spec: ServersSpec, loaded: LoadedSpec) -> ServerProcesses:
    """The launcher of `kind: vllm`."""
    assert spec.launch is not None
    model = loaded.spec.model
    return vllm_servers(spec.launch, resolve_model(model.path, model.revision, loaded.base), loaded.spec.sampling)


def vllm_servers(launch: LaunchSpec, folder: Path, sampling: SamplingParams) -> ServerProcesses:
    """vLLM servers, not yet started.

    Args:
        launch: GPUs, arguments, interpreter.
        folder: The model's files.
        sampling: The spec's sampling; servers are started so that they report its log-probs.
    """
    added: list[str] = []
    if changes_distribution(sampling) and not any(arg.startswith("--logprobs-mode") for arg in launch.args):
        added += ["--logprobs-mode", "processed_logprobs"]
    return _servers(launch, ["-m", "vllm.entrypoints.cli.main", "serve", str(folder)], "--tensor-parallel-size", added)


def _servers(launch: LaunchSpec, start: list[str], tp_flag: str, added: list[str]) -> ServerProcesses:
    """One server for each `tp` of the GPUs; one without a GPU if there is none."""

    def command(port: int) -> list[str]:
        tensor_parallel = [tp_flag, str(launch.tp)] if launch.tp > 1 else []
        place = ["--host", "127.0.0.1", "--port", str(port)]
        return [launch.python or sys.executable, *start, *place, *tensor_parallel, *added, *launch.args]

    groups = [tuple(launch.indexes[at : at + launch.tp]) for at in range(0, len(launch.indexes), launch.tp)] or [()]
    servers = [LaunchedServer(command, launch.env, gpus) for gpus in groups]
    return ServerProcesses(servers, ready_timeout=launch.ready_timeout, restarts=launch.restarts)
