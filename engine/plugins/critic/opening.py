"""Makes the critic of a training from its spec."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.errors import TrainError
from engine.plugins.critic.spec import ValueCritic
from engine.tokens.catalogue import resolve_model

if TYPE_CHECKING:
    from engine.plugins.critic.critic import Critic
    from engine.schemas.train import TrainSpec
    from engine.spec.load import LoadedSpec
    from engine.tokens.template import ChatTemplate
    from engine.train.packed_model import PackedModel
    from engine.train.policy import Policy


def objective_of(loaded: LoadedSpec, train: TrainSpec, template: ChatTemplate, policy: Policy) -> Critic | None:
    """The critic of `train.critic`; None if it is not set, or of another plugin's kind.

    Raises:
        TrainError: kind `train_setup`: the credit method reads no values, or the critic's model does not fit the policy.
        ModelError: the files of the critic's model cannot be found or loaded.
    """
    if not isinstance(train.critic, ValueCritic):
        return None
    from engine.plugins.critic.critic import Critic

    return Critic(
        train.critic,
        loaded.spec.rewards.credit,
        policy,
        policy.net.process_group,
        seed=train.seed,
        model=_own_model(loaded, train, train.critic, template, policy) if train.critic.own_model else None,
        gradient_checkpointing=train.memory.gradient_checkpointing,
    )


def _own_model(
    loaded: LoadedSpec, train: TrainSpec, critic: ValueCritic, template: ChatTemplate, policy: Policy
) -> PackedModel:
    """Load the model of a `network`."""
    from engine.train.policy import open_model

    path, revision = critic.model
    model = open_model(
        policy.net.folder if path is None else resolve_model(path, revision, loaded.base),
        train,
        temperature=1.0,
        vocab=template.vocab_size,
        vision=template.vision,
        process_group=policy.net.process_group,
    )
    size, wanted = (net.model.get_input_embeddings().weight.shape[0] for net in (model, policy.net))
    if size != wanted:
        raise TrainError(
            f"`train.critic.path` {path}: its vocabulary has {size} tokens and that of the policy {wanted}; use a model with "
            "the same tokenizer",
            kind="train_setup",
        )
    return model
