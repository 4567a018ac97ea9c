"""Compares the trainer's weights with the model files of each server, before the first push to it.

SGLang skips weights whose names it does not know, and may stop in the middle of a load at a shape that does not fit. So both are
found here, from the headers of the server's safetensors files, if its `model_path` is a folder that can be read here. A folder on
another machine cannot be compared.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import BackendError, TrainError
from engine.train.files import tensor_facts

if TYPE_CHECKING:
    from engine.backends.sglang.client import SGLangBackend
    from engine.train.policy import Policy

_TIED = "lm_head.weight"
"""A weight that is in some files of a model with tied embeddings, and not in others."""


class ServerModels:
    """The servers whose model was compared.

    Args:
        backend: The backend, started.
    """

    def __init__(self, backend: SGLangBackend) -> None:
        self._backend = backend
        self._fits: set[str] = set()
        """URLs of the servers that were compared."""

    async def check(self, policy: Policy, *, adapter: bool = False) -> None:
        """Compare names, shapes and kinds of numbers with each server that was not compared yet.

        Args:
            policy: The policy that is trained.
            adapter: Only an adapter is sent: compare the files of its base model.

        Raises:
            TrainError: kind `weights_not_taken`: a server has another model.
        """
        new = [server for server in self._backend.workers if server.healthy and server.url not in self._fits]
        if not new:
            return
        own: Mapping[str, tuple[tuple[int, ...], bool]]
        if adapter:
            own = await asyncio.to_thread(tensor_facts, policy.net.folder)
        elif not (own := await asyncio.to_thread(tensor_facts, policy.net.folder)):
            weights = await asyncio.to_thread(policy.weights)
            own = {name: (tuple(tensor.shape), tensor.is_floating_point()) for name, tensor in weights.items()}
        for server in new:
            try:
                folder = Path(str((await server.json("GET", "/model_info"))["model_path"]))
            except BackendError:  # it is gone: the push finds out
                continue
            theirs = await asyncio.to_thread(tensor_facts, folder)
            if own and theirs and (problem := difference(own, theirs)):
                raise TrainError(
                    f"{server.url} serves {folder}, which is another model than the one that is trained: {problem}. Nothing was "
                    "sent. Start it with the folder of `model.path`",
                    kind="weights_not_taken",
                )
            self._fits.add(server.url)


def difference(
    own: Mapping[str, tuple[tuple[int, ...], bool]], theirs: Mapping[str, tuple[tuple[int, ...], bool]]
) -> str | None:
    """The first thing in which two models differ, in words; None if the weights of one fit the other.

    Args:
        own: Shape of each weight, and whether it is of a floating-point type.
        theirs: The same of the other model.
    """
    for name in sorted((own.keys() ^ theirs.keys()) - {_TIED}):
        return f"it has no weight `{name}`" if name in own else f"its weight `{name}` is not trained or sent"
    for name in sorted(own.keys() & theirs.keys()):
        if own[name] != theirs[name]:
            (shape, _), (other, floating) = own[name], theirs[name]
            if shape != other:
                return f"`{name}` has shape {list(other)} there and {list(shape)} here"
            return f"`{name}` is {'floating-point' if floating else 'quantized'} there and not here"
    return None
