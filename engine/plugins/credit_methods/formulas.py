"""The formulas of the methods: pure functions of a group, which give an advantage for each turn."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from engine.plugins.credit_methods.spec import (
    MtGrpoCredit,
    ProgressCredit,
    RedistributeCredit,
    ScoreCredit,
    TurnDiscountCredit,
)
from engine.rewards.credit.formulas import (
    Member,
    Values,
    compare_episodes,
    compare_turns,
    keys_of,
    returns_to_go,
    shaped,
)


def mt_grpo(spec: MtGrpoCredit, group: Sequence[Member]) -> list[Values]:
    """MT-GRPO (arXiv 2505.11821v1, section 4.2), for any number K_i of turns.

        A_i,k = A^O_i + weight * A^T_i,k    for k < K_i
        A_i,k = A^O_i                       for k = K_i
        A^O_i = (R^O_i - mean(R^O)) / std(R^O),    A^T_i,k = (R^T_i,k - mean(R^T_k)) / std(R^T_k)

    R^O is the sum of the outcome's rewards: the rewards that the spec names, at any turn, or by default all rewards of
    the last turn. R^T_i,k is the rest of what turn k holds. The paper has two turns, of which the first has its own
    reward. An episode without a turn k counts with R^T_i,k = 0. The penalties of all tokens are subtracted from R^O,
    because R^T reaches no earlier turn.

    The result holds one array, float64 [turns], for each episode of the group.
    """
    outcomes, before_last = [], []
    for member in group:
        judged = _judged(spec, member)
        outcomes.append(float(judged.sum()) - math.fsum(member.turn_penalties()))
        before_last.append((member.ledger.totals - judged)[:-1])
    by_episode = compare_episodes(spec, outcomes)
    by_turn = compare_turns(spec, before_last)
    advantages = []
    for member, of_episode, turns in zip(group, by_episode, by_turn, strict=True):
        values = np.full(member.ledger.turns, of_episode)
        values[: len(turns)] += spec.weight * turns
        advantages.append(values)
    return advantages


def _judged(spec: MtGrpoCredit, member: Member) -> Values:
    """The outcome's part of each turn's reward, float64 [turns]."""
    ledger = member.ledger
    judged = np.zeros(ledger.turns)
    if spec.outcome is None:
        judged[-1:] = ledger.totals[-1:]
    else:
        for name in dict.fromkeys(spec.outcome):
            judged += ledger.matrix.get(name, 0.0)
    return judged


def turn_discount(spec: TurnDiscountCredit, group: Sequence[Member]) -> list[Values]:
    """Discount by turns, then compare with the group (`baseline: none, scale: none` gives the discounted numbers).

        sum:       R_t = r_t + gamma * R_t+1
        max:       R_t = max over k >= t of gamma^(k - t) * r_k
        attempts:  R   = gamma^(T - 1) * (r_1 + … + r_T)    for every turn of an episode of T turns

    `sum` is AReaL's `apply_reward_discount` (code of arXiv 2505.24298): with gamma 0.9, a final reward of 10 after
    three turns is 8.1, 9, 10. `max` is the alternative that Kevin compares it with (arXiv 2507.11948, section 3.2): a
    turn is worth the best later reward. `attempts` is AReaL's multi-turn workflow: an episode that is right at the t-th
    attempt has r * gamma^(t - 1) for all its turns.

    Penalties of tokens are no attempts: `sum` and `max` subtract P_t = p_t + gamma * P_t+1, and `attempts` the sum of
    them. An episode that has ended counts with 0 in the baseline of later turns.

    The result holds one array, float64 [turns], for each episode of the group.
    """
    ledgers = [member.ledger for member in group]
    penalties = [member.turn_penalties() for member in group]
    if spec.form == "attempts":
        scores = [
            ledger.total * spec.gamma ** max(ledger.turns - 1, 0) - math.fsum(of)
            for ledger, of in zip(ledgers, penalties, strict=True)
        ]
        advantages = compare_episodes(spec, scores)
        return [np.full(ledger.turns, value) for ledger, value in zip(ledgers, advantages, strict=True)]
    discount = returns_to_go if spec.form == "sum" else best_to_come
    rows = [
        discount(ledger.totals, spec.gamma) - returns_to_go(of, spec.gamma)
        for ledger, of in zip(ledgers, penalties, strict=True)
    ]
    return compare_turns(spec, rows)


def best_to_come(rewards: Values, gamma: float) -> Values:
    """R_t = max(r_t, gamma * R_t+1), of shape [turns] as the rewards."""
    best = np.array(rewards, np.float64)
    for turn in range(len(best) - 2, -1, -1):
        best[turn] = max(best[turn], gamma * best[turn + 1])
    return best


def score(spec: ScoreCredit, group: Sequence[Member]) -> list[Values]:
    """SCoRe's reward shaping (arXiv 2409.12917, section 5.2), for any number of attempts.

        r'_k = r_k + alpha * (r_k - r_k-1),    r'_1 = r_1

    then the return from each turn on (`gamma`), compared with the group at the same turn as in `turn_return`. The paper
    has two attempts, and the second gets the bonus alpha * (r(y_2) - r(y_1)). Every turn is an attempt.

    The result holds one array, float64 [turns], for each episode of the group.
    """
    rewards = shaped(group, spec.reward, lambda chosen, _: chosen + spec.alpha * np.diff(chosen, prepend=chosen[:1]))
    return compare_turns(spec, [returns_to_go(row, spec.gamma) for row in rewards])


def progress(spec: ProgressCredit, group: Sequence[Member]) -> list[Values]:
    """Differences of successive scores, spread backwards: potential-based shaping (Ng, Harada & Russell, ICML 1999,
    equation 2, with the score as potential) in which the turns since the previous score share the difference.

        for turns j < k with successive scores:    d = s_k - s_j,    s before the first score is 0
        r'_t = d * w_t / sum of w,    w_t = decay^(k - t)    for t = j + 1 … k

    The sum of r' is the last score, exactly; turns after it have 0. Then the return from each turn on (`gamma`; with 0
    each turn has its own part only) is compared with the group at the same turn, as in `turn_return`.

    A turn has a score if the reward (any reward, if the spec names none) was written to it, even if it is 0.

    The result holds one array, float64 [turns], for each episode of the group.
    """

    def rise(scores: Values, member: Member) -> Values:
        postings = member.ledger.postings
        scored = {posting.turn for posting in postings if spec.reward is None or posting.name == spec.reward}
        return spread_back(scores, sorted(scored), spec.decay)

    return compare_turns(spec, [returns_to_go(row, spec.gamma) for row in shaped(group, spec.reward, rise)])


def spread_back(scores: Values, turns: Sequence[int], decay: float) -> Values:
    """r', float64 [turns]: each difference is spread over the turns since the previous score."""
    parts = np.zeros(len(scores))
    before, held = -1, 0.0
    for turn in turns:
        difference = float(scores[turn]) - held
        weights = [decay ** (turn - at) for at in range(before + 1, turn)]
        sum_of_weights = math.fsum([*weights, 1.0])
        shares = [difference * (weight / sum_of_weights) for weight in weights]
        parts[before + 1 : turn] = shares
        parts[turn] = difference - math.fsum(shares)  # the rest, so that the sum is exact
        before, held = turn, float(scores[turn])
    return parts


State = tuple[str | int | float, ...]


def redistribute(spec: RedistributeCredit, group: Sequence[Member]) -> list[Values]:
    """RUDDER's reward redistribution (arXiv 1806.07857, section 2: R_t+1 = g_t - g_t-1), with the group as predictor.

        g_t = the mean return of the group's episodes that were in the state to which turn t led
        g_T = the episode's own return,    g before the first turn = 0
        r'_t = g_t - g_t-1

    The sum of r' is the episode's return. RUDDER predicts g with an LSTM; here g is a mean over equal states: those of
    `state_key`, or by default (number of turns, sum of their rewards). An episode counts once in a state, however often
    it was there. States do not contain the penalties of tokens, and these are not redistributed: those of a turn's own
    and of later tokens are subtracted from its r'. The advantage of a turn is its r' relative to the group's at the
    same turn, so g before the first turn cancels.

    The result holds one array, float64 [turns], for each episode of the group.

    Raises:
        LedgerError: the spec has a `state_key`, and the states were not stored when the episodes ran.
    """
    states = _states(spec, group)
    values_of_state: dict[State, list[float]] = defaultdict(list)
    for member, passed in zip(group, states, strict=True):
        for state in {key for key in passed if key is not None}:
            values_of_state[state].append(member.ledger.total)
    expected = {state: math.fsum(returns) / len(returns) for state, returns in values_of_state.items()}
    rows = []
    for member, passed in zip(group, states, strict=True):
        if member.ledger.turns == 0:
            rows.append(np.zeros(0))
            continue
        held, guesses = 0.0, []
        for led_to in passed[1:]:  # a state like no other does not change the expected return
            held = held if led_to is None else expected[led_to]
            guesses.append(held)
        of_tokens = returns_to_go(member.turn_penalties(), 1.0)
        rows.append(np.diff([0.0, *guesses, member.ledger.total]) - of_tokens)
    return compare_turns(spec, rows)


def _states(spec: RedistributeCredit, group: Sequence[Member]) -> list[list[State | None]]:
    """The state in which each turn began; None for a state like no other."""
    if spec.state_key is not None:
        keys = keys_of(group, spec.method)
        return [[(key,) if key else None for key in of_episode] for of_episode in keys]
    states: list[list[State | None]] = []
    for member in group:
        totals = member.ledger.totals
        states.append([(turn, math.fsum(totals[:turn])) for turn in range(member.ledger.turns)])
    return states
