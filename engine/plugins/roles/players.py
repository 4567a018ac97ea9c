"""What the core knows of the roles that a model plays, without their models."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from engine.schemas.backend import default_backend
from engine.spec.added import PlayedRole, played_roles

if TYPE_CHECKING:
    from engine.schemas.episode import EpisodeSpec
    from engine.schemas.role import RoleSpec, ScorerSpec
    from engine.spec.load import LoadedSpec
    from engine.spec.text.diagnostic import DataPath

USER_FIELDS = ("task", "reply", "dialogue", "verdict", "turn")
"""Fields of a user's prompt: the task's fields, the policy's newest reply, the dialogue as text, the grader's text, and
the number of the user's earlier answers."""
JUDGE_FIELDS = ("task", "reply", "replies", "turn")
"""What a judge's prompt may name: the task's fields, the reply that is judged, all replies up to it, and its turn."""


def user(path: DataPath, spec: RoleSpec) -> PlayedRole:
    """The role of `user`, or of one of `users`."""
    name = ":".join(("user", *(str(key) for key in path[1:])))
    return PlayedRole(name=name, spec=spec, blame="user", kinds="user", fields=USER_FIELDS)


def scorer(path: DataPath, spec: ScorerSpec) -> PlayedRole:
    """The role of a judge."""
    return PlayedRole(name=spec.name, spec=spec, blame="environment", kinds="judge", fields=JUDGE_FIELDS)


RoleWeights = Literal["apart", "policy", "base", "copy", "impossible"]
"""The weights of a role during a training.

- `apart`: no training changes them: another model, or another backend
- `policy`: the newest weights of the policy
- `base`: the policy's backend has them, because the policy is an adapter there
- `copy`: a backend of its own with the weights of `model.path`
- `impossible`: `frozen` is asked for, and the servers have only the newest weights
"""


def role_weights(spec: EpisodeSpec, role: PlayedRole) -> RoleWeights:
    """The weights of a role while the spec's `train` section trains its model; `apart` without that section."""
    train, part = spec.train, role.spec
    shares = role.shares_policy(spec)
    servers = {url.rstrip("/") for url in (part.backend.server_urls if part.backend is not None else ())}
    if train is None or not (shares or servers & {url.rstrip("/") for url in spec.backend.server_urls}):
        return "apart"
    adapter = spec.backend.sync_method(train.weight_sync.method, lora=train.adapter is not None) == "adapter"
    if not shares and adapter:
        return "apart"  # a client of its own, whose requests do not name the policy's adapter
    if part.weights == "policy":
        return "policy"
    if not spec.backend.weights_in_servers:
        return "copy"
    return "base" if adapter else "impossible"


def frozen_refusal(name: str, spec: EpisodeSpec) -> tuple[str, str]:
    """Why the weights of a role cannot be frozen, and what to do."""
    lora = spec.train is not None and spec.train.adapter is not None
    how = "the adapter is sent merged into the weights" if lora else "all weights are trained"
    return (
        f"the model of `{name}` would have the newest weights of the policy: it is on the same servers, and {how}",
        "give it a `backend` of its own (other servers), train an adapter (`train.lora`, "
        "`weight_sync.method: adapter`), or "
        "write `weights: policy`",
    )


def role_section(loaded: LoadedSpec, path: DataPath) -> LoadedSpec:
    """A spec for the role at `path`: the role's model, backend and sampling replace the policy's."""
    part = played_roles(loaded.spec)[path].spec
    spec = loaded.spec.model_copy(
        update={
            "model": part.model or loaded.spec.model,
            "backend": part.backend or default_backend(),
            "sampling": part.sampling,
        }
    )
    origins, keys = (
        {
            **{place: origin for place, origin in places.items() if place[:1] not in (("backend",), ("model",))},
            **{place[len(path) :]: origin for place, origin in places.items() if place[: len(path)] == path != place},
        }
        for places in (loaded.origins, loaded.key_origins)
    )
    return replace(loaded, spec=spec, origins=origins, key_origins=keys)
