"""What the core knows of the roles that a model plays, without their models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.spec.added import PlayedRole, played_roles

if TYPE_CHECKING:
    from engine.actions.calling.workers import Workers
    from engine.actions.services import ServiceInputs
    from engine.plugins.roles.judge import Judge
    from engine.plugins.roles.models import RoleModels
    from engine.schemas.role import RoleSpec, ScorerSpec
    from engine.spec.load import LoadedSpec
    from engine.spec.text.diagnostic import DataPath

USER_FIELDS = ("task", "reply", "dialogue", "verdict", "turn")
"""Fields of a user's prompt: the task's fields, the policy's newest reply, the dialogue as text, the grader's text, and the
number of the user's earlier answers."""
JUDGE_FIELDS = ("task", "reply", "replies", "turn")
"""What a judge's prompt may name: the task's fields, the reply that is judged, all replies up to it, and its turn."""


def user(path: DataPath, spec: RoleSpec) -> PlayedRole:
    """The role of `user`, or of one of `users`."""
    name = ":".join(("user", *(str(key) for key in path[1:])))
    return PlayedRole(name=name, spec=spec, blame="user", kinds="user", fields=USER_FIELDS)


def scorer(path: DataPath, spec: ScorerSpec) -> PlayedRole:
    """The role of a judge."""
    return PlayedRole(name=spec.name, spec=spec, blame="environment", kinds="judge", fields=JUDGE_FIELDS)


def open_service(inputs: ServiceInputs) -> RoleModels | None:
    """The hook `open_service`: None if no model plays a role."""
    if not played_roles(inputs.loaded.spec):
        return None
    from engine.plugins.roles.models import RoleModels

    return RoleModels(inputs)


def judge(loaded: LoadedSpec, code: Workers) -> Judge | None:
    """The hook `reward_source`."""
    spec = loaded.spec.rewards.scorer
    if spec is None or not spec.model_played:
        return None
    from engine.plugins.roles.judge import Judge

    return Judge(spec)
