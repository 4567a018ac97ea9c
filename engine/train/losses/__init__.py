"""The policy losses, one file for each formula, and the objective: policy loss, KL penalty and entropy bonus.

    loss, metrics = objective(spec.train, tokens)       # of a micro-batch; add up over micro-batches and processes
    per_token = policy_loss(GspoLoss(), tokens)         # [n], without loss weights and without rollout correction

With r = current / proximal, the ratio of the sampled token's probabilities, and A its advantage, a formula gives the
loss of each token. `engine.schemas.loss` has the config class of each loss: its keys, its formula, the level of its
ratio and its denominator (`engine.train.loss_columns`). Log-probs of -inf and very large ratios give finite losses and
gradients (`engine.train.ratios`).
"""

from engine.train.losses.formulas import PolicyLoss, loss_ratio, policy_loss
from engine.train.losses.objective import objective

__all__ = ["PolicyLoss", "loss_ratio", "objective", "policy_loss"]
