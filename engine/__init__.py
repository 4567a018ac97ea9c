"""Declared multi-turn episodes for reinforcement learning, exact to the token.

    import engine

    run = engine.run(engine.load("guess.yaml", {"tasks.limit": 4}))
    run.rows()                                              # docs/python.md

Invariant: `import engine` imports nothing but the standard library; a public name imports its module when it is used.
"""

import sys
from typing import TYPE_CHECKING, Any

from engine import moved_names

if TYPE_CHECKING:
    from engine.api.checks import check as check
    from engine.api.checks import check_files as check_files
    from engine.api.launch import Launch as Launch
    from engine.api.launch import play as play
    from engine.api.launch import run as run
    from engine.api.launch import run_async as run_async
    from engine.api.progress import ConsoleProgress as ConsoleProgress
    from engine.api.progress import Progress as Progress
    from engine.api.runs import Run as Run
    from engine.api.runs import StoredEpisode
    from engine.api.runs import open as open
    from engine.api.specs import load as load
    from engine.api.trainings import Training as Training
    from engine.api.trainings import TrainingLaunch as TrainingLaunch
    from engine.api.trainings import fit as fit
    from engine.api.trainings import fit_async as fit_async
    from engine.environments.function import Dialogue as Dialogue
    from engine.environments.function import End as End
    from engine.environments.function import environment as environment
    from engine.errors import EngineError as EngineError
    from engine.errors import SpecError as SpecError
    from engine.schemas.environment import Environment as Environment
    from engine.schemas.environment import EpisodeView as EpisodeView
    from engine.schemas.environment import Reset as Reset
    from engine.schemas.environment import Step as Step
    from engine.schemas.environment import Task as Task
    from engine.schemas.environment import ToolReply as ToolReply
    from engine.schemas.environment import User as User
    from engine.schemas.environment import UserTurn as UserTurn
    from engine.schemas.environment import action as action
    from engine.schemas.message import Message as Message
    from engine.schemas.reward import RewardEvent as RewardEvent
    from engine.spec.code.entry import looking as looking
    from engine.spec.load import LoadedSpec
    from engine.spec.text.diagnostic import Diagnostic as Diagnostic
    from engine.validate.registry import rule_pages as rule_pages

    Episode = StoredEpisode
    Spec = LoadedSpec

__version__ = "0.1.0"

PUBLIC = {
    "ConsoleProgress": "engine.api.progress:ConsoleProgress",
    "Diagnostic": "engine.spec.text.diagnostic:Diagnostic",
    "Dialogue": "engine.environments.function:Dialogue",
    "End": "engine.environments.function:End",
    "EngineError": "engine.errors:EngineError",
    "Environment": "engine.schemas.environment:Environment",
    "Episode": "engine.api.runs:StoredEpisode",
    "EpisodeView": "engine.schemas.environment:EpisodeView",
    "Launch": "engine.api.launch:Launch",
    "Message": "engine.schemas.message:Message",
    "Progress": "engine.api.progress:Progress",
    "Reset": "engine.schemas.environment:Reset",
    "RewardEvent": "engine.schemas.reward:RewardEvent",
    "Run": "engine.api.runs:Run",
    "Spec": "engine.spec.load:LoadedSpec",
    "SpecError": "engine.errors:SpecError",
    "Step": "engine.schemas.environment:Step",
    "Task": "engine.schemas.environment:Task",
    "Training": "engine.api.trainings:Training",
    "TrainingLaunch": "engine.api.trainings:TrainingLaunch",
    "ToolReply": "engine.schemas.environment:ToolReply",
    "User": "engine.schemas.environment:User",
    "UserTurn": "engine.schemas.environment:UserTurn",
    "action": "engine.schemas.environment:action",
    "check": "engine.api.checks:check",
    "check_files": "engine.api.checks:check_files",
    "environment": "engine.environments.function:environment",
    "fit": "engine.api.trainings:fit",
    "fit_async": "engine.api.trainings:fit_async",
    "load": "engine.api.specs:load",
    "looking": "engine.spec.code.entry:looking",
    "open": "engine.api.runs:open",
    "play": "engine.api.launch:play",
    "rule_pages": "engine.validate.registry:rule_pages",
    "run": "engine.api.launch:run",
    "run_async": "engine.api.launch:run_async",
}
"""The public names (docs/python.md), and where each is defined. None is that of a sub-package or module, because an
import of this would replace it."""

sys.meta_path.append(moved_names)


def __getattr__(name: str) -> Any:
    if name not in PUBLIC:
        raise AttributeError(f"module `engine` has no attribute `{name}`")
    from engine.plugin import load

    value = globals()[name] = load(PUBLIC[name])
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *PUBLIC})
