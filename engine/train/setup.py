"""Makes the parts of a training from its spec: the `train:` section and the learner, and says what of the spec a resume
may change.

A changed value holds from the first step that is not in the batch log; steps that are repeated use the learning rate
that they had.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from engine.backends.device import pick_device
from engine.errors import TrainError
from engine.plugin import load
from engine.schemas.backend import kinds_that_train
from engine.schemas.sections import used_plugins
from engine.spec.added import missing_sync, trains_backend
from engine.spec.load import override_spec
from engine.store.header import changes_of, resumable_keys
from engine.tokens.catalogue import resolve_model
from engine.tokens.loading import load_format
from engine.train.auxiliary import OBJECTIVES
from engine.train.credited_rows import RewardKl
from engine.train.distributed import join_alone
from engine.train.learner import Learner
from engine.train.policy import Policy

if TYPE_CHECKING:
    from engine.schemas.episode import EpisodeSpec
    from engine.schemas.train import TrainSpec
    from engine.spec.load import LoadedSpec
    from engine.tokens.template import ChatTemplate
    from engine.train.distributed import ProcessGroup
    from engine.train.step_source import StepSource


ALLOWED = (
    "train.steps",
    "train.epochs",
    "train.optimizer.lr",
    "train.optimizer.schedule",
    "train.optimizer.warmup_steps",
    "train.checkpoints.*",
    "train.memory.*",
    "train.weight_sync.*",
    "limits.*_seconds",
    "*.timeout",
    "backend.try_timeout",
    "backend.health_timeout",
    "backend.retries",
    "backend.wait",
    "backend.url",
    "backend.urls",
    "backend.launch",
    "backend.launch.*",
    "rollout.concurrency",
    "rollout.live_episodes",
    "rollout.out",
    "description",
)
"""Paths of values that a resume may change, with `resumable_keys`: they do not change what an episode or a row is. `*`
stands for any characters."""


def train_spec_of(loaded: LoadedSpec) -> TrainSpec:
    """The spec's `train:` section as it is used; with `epochs`, `steps` is the number of steps that they take.

    Raises:
        TrainError: kind `train_setup`: the spec has no `train:` section, its backend cannot be trained with, or
            `train.data` has no rows.
        SpecError: with `epochs`, the tasks cannot be read.
    """
    spec = loaded.spec
    if spec.train is None:
        raise TrainError(
            f"{loaded.path}: the spec has no `train:` section; `train: {{}}` takes every default", kind="train_setup"
        )
    if trains_backend(spec) and not spec.backend.trains:
        raise TrainError(
            f"{loaded.path}: a `{spec.backend.kind}` backend cannot take new weights; train with {kinds_that_train()}",
            kind="train_setup",
        )
    if trains_backend(spec) and (why := missing_sync(spec.backend.kind)) is not None:
        raise TrainError(f"{loaded.path}: {why}", kind="train_setup")
    train = spec.train.effective()
    if train.epochs is None:
        return train
    steps = math.ceil(source_class(train).steps_of(loaded, train, train.epochs))
    return train.model_copy(update={"steps": max(1, steps)})


def source_class(train: TrainSpec) -> type[StepSource]:
    """The class of a training's batches."""
    source: type[StepSource] = load(train.facts.use)
    return source


def with_precision(loaded: LoadedSpec, began: EpisodeSpec | None = None) -> LoadedSpec:
    """The spec with the precision that its training has, where it says `auto`.

    Args:
        loaded: The spec.
        began: The spec that the training began with, at a resume. Default: the training begins here, on this device.

    Raises:
        EngineError: torch does not have `train.device`.
    """
    train = loaded.spec.train
    if train is None or train.precision != "auto":
        return loaded
    if began is None or began.train is None:
        precision: str = train.precision_on(pick_device(train.device, "train.device").type)
    else:
        precision = began.train.precision
    return override_spec(loaded, [f"train.precision={precision}"])


def check_changes(before: EpisodeSpec, after: EpisodeSpec) -> list[str]:
    """Check that a spec differs from the one that a training began with only in values that a resume may change.

    Returns:
        The paths of the values that differ.

    Raises:
        TrainError: kind `train_setup`: other values differ; the message names them.
    """
    may_change = (*ALLOWED, *resumable_keys())
    changed, refused = changes_of(before, after, may_change)
    if refused:
        named = ", ".join(f"`{path}`" for path in refused[:8])
        raise TrainError(
            f"a resumed training cannot change {named}: its episodes and updates depend on "
            f"{'it' if len(refused) == 1 else 'them'}. Leave it out, or begin another training. What may change: "
            f"{', '.join(may_change)}",
            kind="train_setup",
        )
    return changed


def learner_of(loaded: LoadedSpec, format: ChatTemplate, process_group: ProcessGroup) -> Learner:
    """Make the learner: the policy with the sampler's temperature and vocabulary, and its optimizer.

    Raises:
        TrainError: kind `train_setup`: the model cannot be trained here.
        ModelError: the model's files cannot be found or loaded.
    """
    spec, train = loaded.spec, train_spec_of(loaded)
    credit = spec.rewards.credit
    named = set(process_group.all_gather(train.precision_on(pick_device(train.device, "train.device").type)))
    if len(named) > 1:
        raise TrainError(
            f"the processes of this training compute in {' and '.join(sorted(named))}; write the one with which it "
            "began as `train.precision`",
            kind="train_setup",
        )
    if train.samples_episodes and credit.needs_values and train.critic is None:
        raise TrainError(
            f"{loaded.path}: `{credit.method}` needs a critic: add `train.critic: {{kind: probe}}`", kind="train_setup"
        )
    if train.memory.offload == "all" and process_group.torch_group is None:
        process_group = join_alone()
    policy = Policy.load(
        resolve_model(spec.model.path, spec.model.revision, loaded.base),
        train,
        temperature=spec.sampling.temperature if train.samples_episodes else 1.0,
        vocab=format.vocab_size,
        vision=format.vision,
        process_group=process_group,
        replay_experts=spec.backend.asks_experts and train.samples_episodes,
    )
    penalties = [RewardKl(train.kl.coefficient, credit)] if train.kl.in_reward else []
    objectives = [*penalties, *OBJECTIVES.made(used_plugins(spec), loaded, train, format, policy)]
    return Learner(policy, train, process_group=process_group, objectives=objectives)


def follow(loaded: LoadedSpec, process_group: ProcessGroup) -> None:
    """In every process except process 0: run the calls of process 0 until it closes.

    Raises:
        EngineError: as `learner_of`.
    """
    learner_of(loaded, load_format(loaded.spec.model, loaded.base), process_group).follow()
