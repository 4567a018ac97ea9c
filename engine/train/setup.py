"""Makes the parts of a training from its spec: the `train:` section and the learner."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.errors import TrainError
from engine.schemas.backend import kinds_that_train
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
    if not spec.backend.trains:
        raise TrainError(
            f"{loaded.path}: a `{spec.backend.kind}` backend cannot take new weights; train with {kinds_that_train()}",
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
