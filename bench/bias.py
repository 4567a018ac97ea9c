"""How much of the true policy gradient each credit method and each loss keeps, computed exactly on a game of two turns.

    python bench/bias.py                                # the tables, in seconds
    python bench/bias.py --json                         # every credit x baseline x scale x loss, one JSON object a line
    python bench/bias.py --write docs/credit.md         # write the tables between the marks of the document
    python bench/bias.py --check docs/credit.md         # exit status 1 if the document has other tables

The game: in turn 1 (one token) the policy stops with probability 0.6 and is paid `stop_reward`, or goes on. In turn 2 (three
tokens; the first is the choice, the other two are certain) it is right with probability 0.3 and is paid 1, else 0. The
policy has two parameters: the logit of stopping and the logit of being right. A group has four episodes.

Every group is enumerated with its probability, so the expected gradient has no sampling error. Advantages come from
`engine.rewards.credit`, the gradient from `engine.train.losses.objective` with the weights of `engine.train.loss_columns`: the
code that trains. The true derivatives are those of the expected reward, in closed form.

A share is an expected derivative divided by the true one. If all shares are 1 the gradient is unbiased. If they are equal, it has
the right direction and another size, which a learning rate makes up for. If they differ, it has another direction.
`dr_grpo` divides by a constant length; its shares are given times that constant.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.rewards.credit import Member, credit_tokens
from engine.rewards.ledger import Ledger
from engine.rewards.sealed import SealedLedger
from engine.schemas.credit import CREDITS, ComparedCredit, CreditSpec, EntryCredit, read_credit
from engine.schemas.loss import LOSSES
from engine.schemas.reward import RewardEvent
from engine.schemas.train import TrainSpec
from engine.train.loss_columns import token_loss_weights
from engine.train.loss_tokens import LossTokens
from engine.train.losses import objective

STOP, RIGHT = 0.6, 0.3
"""Probabilities of stopping after turn 1, and of being right in turn 2."""
GROUP = 4
LENGTH = 4
"""The length of `dr_grpo`: the tokens of the longest episode."""
TOKENS = (1, 3)
"""Sampled tokens of turn 1 and of turn 2."""
PAID, UNPAID, EVEN = 0.6, 0.0, RIGHT
"""Rewards of stopping. With `EVEN`, stopping is worth as much as going on: the true derivative by its logit is 0."""
MANY = 8
"""Groups of a large step."""
LATER = (0.55, 0.34)
"""The probabilities after a first update, from which the second mini-batch or epoch starts. All ratios are within 1 ± 0.2."""
BASELINES, SCALES = ("mean", "leave_one_out", "none"), ("std", "none")
BEGIN, END = "<!-- bench/bias.py: begin -->\n", "<!-- bench/bias.py: end -->\n"

Pair = tuple[float, float]
"""A number for each parameter: stop, right."""


@dataclass(frozen=True, slots=True)
class Play:
    """One course of an episode."""

    rewards: tuple[float, ...]
    """By turn."""
    probability: float
    events: tuple[bool, ...]
    """By turn: whether the parameter's event (stop, right) occurred."""

    @property
    def ends(self) -> list[int]:
        """One past each turn's last token."""
        return list(itertools.accumulate(TOKENS[: len(self.rewards)]))


def plays(stop_reward: float) -> list[Play]:
    """Every course of an episode."""
    return [
        Play((stop_reward,), STOP, (True,)),
        Play((0.0, 1.0), (1 - STOP) * RIGHT, (False, True)),
        Play((0.0, 0.0), (1 - STOP) * (1 - RIGHT), (False, False)),
    ]


def true_gradient(stop_reward: float, stop: float = STOP, right: float = RIGHT) -> Pair:
    """Derivatives by the two logits of E[reward] = stop * stop_reward + (1 - stop) * right."""
    return stop * (1 - stop) * (stop_reward - right), (1 - stop) * right * (1 - right)


def groups(stop_reward: float) -> Iterator[tuple[float, list[Play]]]:
    """Every group, in one order of its episodes, with the probability of all of its orders."""
    for group in itertools.combinations_with_replacement(plays(stop_reward), GROUP):
        orders = math.factorial(GROUP)
        for play in set(group):
            orders //= math.factorial(group.count(play))
        yield orders * math.prod(play.probability for play in group), list(group)


@cache
def sealed(rewards: tuple[float, ...]) -> SealedLedger:
    """The ledger of an episode that is paid in its last turn."""
    ledger = Ledger()
    ledger.post(RewardEvent(turn=len(rewards) - 1, name="reward", value=rewards[-1]), len(rewards) - 1)
    return ledger.seal(len(rewards))


def member(play: Play, expected: float) -> Member:
    """What credit is given of an episode.

    The critic is exact: before each token it has the expected return of the policy, given the tokens before it.
    """
    values = np.array([expected, RIGHT, play.rewards[-1], play.rewards[-1]])[: play.ends[-1]]
    states = ["start", "second"][: len(play.rewards)]
    return Member(ledger=sealed(play.rewards), state_keys=states, values=values, ends=play.ends)


@dataclass(frozen=True, slots=True)
class Sampled:
    """Every group of the game with the advantages of its tokens."""

    probabilities: list[float]
    groups: list[list[Play]]
    advantages: list[np.ndarray]
    """For each episode of each group, [tokens]."""


def sample(credit: CreditSpec, stop_reward: float) -> Sampled:
    """Enumerate the groups and compute their credit."""
    expected = STOP * stop_reward + (1 - STOP) * RIGHT
    found = Sampled([], [], [])
    for probability, group in groups(stop_reward):
        found.probabilities.append(probability)
        found.groups.append(group)
        for turns in credit_tokens(credit, [member(play, expected) for play in group]):
            found.advantages.append(np.concatenate(turns))
    return found


@cache
def weights(loss: str, lengths: tuple[int, ...], step_groups: int) -> list[np.ndarray]:
    """The expected loss weights of a group's tokens in a step of `step_groups` groups, times `step_groups`, by episode.

    The derivative of the step is the sum over its groups; each has the same expectation.

    Args:
        loss: The loss of `train.loss`, as JSON.
        lengths: LossTokens of the group's episodes.
        step_groups: Groups of the step.
    """
    spec = TrainSpec.model_validate({"loss": json.loads(loss)}).loss
    others = GROUP * (step_groups - 1)
    mean = [np.zeros(length) for length in lengths]
    for longer in range(others + 1):
        chance = math.comb(others, longer) * (1 - STOP) ** longer * STOP ** (others - longer)
        whole = [*lengths, *[sum(TOKENS)] * longer, *[TOKENS[0]] * (others - longer)]
        names = [str(number) for number in range(len(whole))]
        found = token_loss_weights(spec, whole, names, length=LENGTH)
        mean = [one + chance * step_groups * other for one, other in zip(mean, found[:GROUP], strict=True)]
    return mean


def gradient(sampled: Sampled, loss: Any, *, step_groups: int = 1, policy: Pair = (STOP, RIGHT)) -> Pair:
    """The expected policy gradient of a step, times the length for `dr_grpo`.

    Args:
        sampled: Groups with their advantages; they were sampled with (STOP, RIGHT).
        loss: The loss of `train.loss`.
        step_groups: Groups of a step.
        policy: The current probabilities, which differ from the sampler's after a first update.
    """
    signs, choices, turns, episodes, factors = [], [], [], [], []
    for probability, group in zip(sampled.probabilities, sampled.groups, strict=True):
        lengths = tuple(play.ends[-1] for play in group)
        for play, weight in zip(group, weights(loss.model_dump_json(), lengths, step_groups), strict=True):
            factors.append(probability * weight)
            for turn, occurred in enumerate(play.events):
                signs += [1.0 if occurred else -1.0] * TOKENS[turn]
                choices += [1.0] + [0.0] * (TOKENS[turn] - 1)
                turns += [turn] * TOKENS[turn]
            episodes += [episodes[-1] + 1 if episodes else 0] * play.ends[-1]
    turn, row = torch.tensor(turns), torch.tensor(episodes)
    sign, choice = torch.tensor(signs, dtype=torch.float64), torch.tensor(choices, dtype=torch.float64)

    def logprobs(logits: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.logsigmoid(sign * logits[turn]) * choice

    logits = torch.logit(torch.tensor(policy, dtype=torch.float64)).requires_grad_()
    old = logprobs(torch.logit(torch.tensor([STOP, RIGHT], dtype=torch.float64)))
    tokens = LossTokens(
        logprobs=logprobs(logits),
        proximal=old,
        sampler=old,
        advantages=torch.tensor(np.concatenate(sampled.advantages)),
        loss_weights=torch.tensor(np.concatenate(factors)),
        rows=row,
        turns=2 * row + turn,
    )
    value, _ = objective(TrainSpec(loss=loss), tokens)
    value.backward()  # type: ignore[no-untyped-call]
    constant = LENGTH if loss.kind == "dr_grpo" else 1
    assert logits.grad is not None
    stop, right = (-constant * logits.grad).tolist()
    return stop, right


def share(found: Pair, true: Pair) -> Pair:
    return found[0] / true[0] if true[0] else math.nan, found[1] / true[1]


def losses() -> list[Any]:
    """Every loss of `train.loss`, with its defaults."""
    return [declared() for declared in LOSSES.members()]


def loss_of(kind: str) -> Any:
    return next(loss for loss in losses() if loss.kind == kind)


def methods() -> list[type[Any]]:
    """Every credit method except a function of the user's own."""
    return [each for each in CREDITS.members() if not issubclass(each, EntryCredit)]


def credits() -> Iterator[CreditSpec]:
    """Every credit method, with every baseline and scale where it has them."""
    for method in methods():
        named = {"method": method.model_fields["method"].default}
        if issubclass(method, ComparedCredit):
            for baseline, scale in itertools.product(BASELINES, SCALES):
                yield read_credit({**named, "baseline": baseline, "scale": scale})
        else:
            yield read_credit(named)


UNBIASED = read_credit({"method": "turn_return", "baseline": "leave_one_out", "scale": "none"})


def credit_figures(credit: CreditSpec, loss: Any) -> dict[str, float]:
    """Shares by stopping for two rewards of stopping, the share by being right, and the derivative where the true one is 0."""
    paid, unpaid, even = (gradient(sample(credit, reward), loss) for reward in (PAID, UNPAID, EVEN))
    return {
        "stop": share(paid, true_gradient(PAID))[0],
        "stop_unpaid": share(unpaid, true_gradient(UNPAID))[0],
        "right": share(paid, true_gradient(PAID))[1],
        "stop_even": even[0],
    }


def loss_figures(loss: Any) -> dict[str, float]:
    """Shares of a loss with unbiased credit: in a step of one group, of many, and after a first update."""
    sampled, true = sample(UNBIASED, PAID), true_gradient(PAID)
    one = share(gradient(sampled, loss), true)
    many = share(gradient(sampled, loss, step_groups=MANY), true)
    later = share(gradient(sampled, loss, policy=LATER), true_gradient(PAID, *LATER))
    names = ("stop", "right", "stop_many", "right_many", "stop_later", "right_later")
    return dict(zip(names, (*one, *many, *later), strict=True))


# ---- tables


def credit_table() -> list[str]:
    """Every method, baseline and scale, with a loss that weighs all tokens alike."""
    loss, cells = loss_of("reinforce"), {}
    for credit in credits():
        figures = credit_figures(credit, loss)
        text = " · ".join(_number(figures[name]) for name in ("stop", "stop_unpaid", "right"))
        row = (credit.method, getattr(credit, "baseline", "–"))
        cells[row, getattr(credit, "scale", "–")] = f"{text} · {_signed(figures['stop_even'])}"
    rows = list(dict.fromkeys(row for row, _ in cells))
    body = [
        [f"`{method}`", f"`{baseline}`" if baseline in BASELINES else "a critic"]
        + [cells.get(((method, baseline), scale), cells.get(((method, baseline), "–"), "")) for scale in SCALES]
        for method, baseline in rows
    ]
    return _table(["`method`", "`baseline`", *[f"`scale: {scale}`" for scale in SCALES]], body)


def loss_table() -> list[str]:
    """Every loss with unbiased credit."""
    body = []
    for loss in losses():
        figures = loss_figures(loss)
        pairs = [
            f"{_number(figures[f'stop{name}'])} · {_number(figures[f'right{name}'])}"
            for name in ("", "_many", "_later")
        ]
        body.append([f"`{loss.kind}`", *pairs])
    return _table(["`kind`", "1 group a step", f"{MANY} groups a step", "after a first update"], body)


def product_table() -> list[str]:
    """Every method with every loss, with `leave_one_out` and without scaling. Losses with equal columns share one."""
    chosen = [credit for credit in credits() if _plain(credit)]
    played = [sample(credit, PAID) for credit in chosen]
    columns: dict[tuple[str, ...], list[str]] = {}
    for loss in losses():
        pairs = [share(gradient(sampled, loss), true_gradient(PAID)) for sampled in played]
        column = tuple(f"{_number(stop)} · {_number(right)}" for stop, right in pairs)
        columns.setdefault(column, []).append(f"`{loss.kind}`")
    body = [[f"`{credit.method}`", *[column[row] for column in columns]] for row, credit in enumerate(chosen)]
    return _table(["`method`", *[", ".join(kinds) for kinds in columns.values()]], body)


def _plain(credit: CreditSpec) -> bool:
    return not isinstance(credit, ComparedCredit) or (credit.baseline, credit.scale) == ("leave_one_out", "none")


def _table(head: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *body)]


def _number(value: float) -> str:
    """Two digits, halves upwards: the last bit of a sum does not decide."""
    rounded = Decimal(repr(round(value, 9))).quantize(Decimal("0.01"), ROUND_HALF_UP)
    return str(abs(rounded) if rounded == 0 else rounded)


def _signed(value: float) -> str:
    return f"{value:+.3f}" if abs(value) >= 0.0005 else "0"


def document() -> str:
    """The three tables with their headings, as Markdown."""
    parts = [
        "**Credit.** Every method with the loss `reinforce`. Each cell has four numbers: the share of the derivative by stopping if it "
        f"is paid {PAID}, the same if it is paid {UNPAID:.0f}, the share of the derivative by being right, and the derivative by "
        "stopping if its true value is 0.",
        *["\n".join(credit_table())],
        "**Losses.** Every loss with `turn_return`, `leave_one_out` and no scaling. Each cell has the shares by stopping and by being "
        f"right. In the last column the policy has moved from {STOP} and {RIGHT} to {LATER[0]} and {LATER[1]} since it was sampled, "
        "as in a second mini-batch or epoch.",
        "\n".join(loss_table()),
        "**Methods and losses.** With `leave_one_out` and no scaling, in a step of one group.",
        "\n".join(product_table()),
    ]
    return "\n\n".join(parts) + "\n"


def between_marks(text: str) -> tuple[str, str, str]:
    """A document as the parts before, between and after the marks.

    Raises:
        ValueError: a mark is missing.
    """
    before, begin, rest = text.partition(BEGIN)
    middle, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the document has no lines `{BEGIN.strip()}` and `{END.strip()}`")
    return before, middle, after


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="every combination, one JSON object a line")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the tables between the marks of this file")
    parser.add_argument("--check", type=Path, metavar="FILE", help="fail if this file has other tables")
    options = parser.parse_args(arguments)
    if options.json:
        for credit, loss in itertools.product(credits(), losses()):
            figures = {name: round(value, 9) for name, value in credit_figures(credit, loss).items()}
            print(json.dumps({"credit": credit.model_dump(), "loss": loss.kind, **figures}))
        return 0
    tables = document()
    file = options.write or options.check
    if file is None:
        print(tables)
        return 0
    before, written, after = between_marks(file.read_text(encoding="utf-8"))
    if options.write:
        file.write_text(f"{before}{BEGIN}{tables}{END}{after}", encoding="utf-8")
    elif written != tables:
        print(f"{file} has other tables; run `python bench/bias.py --write {file}`")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
