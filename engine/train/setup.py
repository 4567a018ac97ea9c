"""Makes the parts of a training from its spec: the `train:` section, the learner, the spec of the evaluation."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from engine.errors import TrainError
from engine.schemas.generation import SamplingParams
from engine.schemas.tasks import TasksSpec
from engine.tokens.catalogue import resolve_model
from engine.tokens.loading import load_format
from engine.train.learner import Learner
from engine.train.policy import Policy

if TYPE_CHECKING:
    from engine.schemas.train import TrainSpec
    from engine.spec.load import LoadedSpec
    from engine.tokens.format import ChatFormat
    from engine.train.distributed import ProcessGroup


def train_spec_of(loaded: LoadedSpec) -> TrainSpec:
    """The spec's `train:` section.

    Raises:
        TrainError: kind `train_setup`: the spec has no `train:` section, or its backend cannot be trained with.
    """
    spec = loaded.spec
    if spec.train is None:
        raise TrainError(
            f"{loaded.path}: the spec has no `train:` section; `train: {{}}` takes every default", kind="train_setup"
        )
    if spec.backend.kind not in ("local", "sglang"):
        raise TrainError(
            f"{loaded.path}: a `{spec.backend.kind}` backend cannot take new weights; train with `local` or `sglang`",
            kind="train_setup",
        )
    return spec.train


def learner_of(loaded: LoadedSpec, format: ChatFormat, process_group: ProcessGroup) -> Learner:
    """Make the learner: the policy with the sampler's temperature and vocabulary, and its optimizer.

    Raises:
        TrainError: kind `train_setup`: the model cannot be trained here.
        ModelError: the model's files cannot be found or loaded.
    """
    spec, train = loaded.spec, train_spec_of(loaded)
    policy = Policy.load(
        resolve_model(spec.model.path, spec.model.revision, loaded.base),
        train,
        temperature=spec.sampling.temperature,
        vocab=format.vocab_size,
        vision=format.vision,
    )
    return Learner(policy, train, episode_tokens=spec.limits.tokens_per_episode, process_group=process_group)


def follow(loaded: LoadedSpec, process_group: ProcessGroup) -> None:
    """In every process except process 0: run the calls of process 0 until it closes.

    Raises:
        EngineError: as `learner_of`.
    """
    learner_of(loaded, load_format(loaded.spec.model, loaded.base), process_group).follow()


def evaluation_of(loaded: LoadedSpec) -> LoadedSpec:
    """The spec of the training's evaluation, with the tasks, samples and sampling of `train.eval`.

    Raises:
        TrainError: kind `train_setup`: `train.eval.tasks` or `train.eval.sampling` is invalid.
    """
    spec = loaded.spec
    wanted = spec.train.eval if spec.train is not None else None
    if wanted is None:
        return loaded
    try:
        if wanted.tasks is not None:
            loaded = loaded.with_tasks_of(TasksSpec.model_validate(wanted.tasks), ("train", "eval", "tasks"))
        sampling = SamplingParams.model_validate(spec.sampling.model_dump() | wanted.sampling)
    except ValueError as error:
        raise TrainError(f"{loaded.path}: train.eval: {error}", kind="train_setup") from error
    tasks = loaded.spec.tasks
    if wanted.limit is not None:
        tasks = tasks.model_copy(update={"limit": wanted.limit})
    rollout = spec.rollout.model_copy(update={"samples_per_task": wanted.samples})
    changed = loaded.spec.model_copy(update={"tasks": tasks, "sampling": sampling, "rollout": rollout})
    return replace(loaded, spec=changed)
