"""The figures of `bench/bias.py`: what the credit methods and losses keep of the policy gradient."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
from credit_kit import advantages, sealed
from installed_plugins import needs_plugin

from engine.schemas.credit import RewardsSpec, read_credit
from engine.schemas.limits import LimitsSpec
from engine.schemas.train import TrainSpec

ROOT = Path(__file__).parents[4]


@pytest.fixture(scope="module")
def bias() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bias", ROOT / "bench/bias.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["bias"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_the_tables_of_the_documentation_are_current(bias: ModuleType) -> None:
    assert bias.main(["--check", str(ROOT / "docs/credit.md")]) == 0


def test_a_document_with_other_tables_is_told_and_written(
    bias: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bias, "document", lambda: "tables\n")
    file = tmp_path / "page.md"
    file.write_text(f"before\n{bias.BEGIN}old\n{bias.END}after\n")
    assert bias.main(["--check", str(file)]) == 1
    assert bias.main(["--write", str(file)]) == 0
    assert file.read_text() == f"before\n{bias.BEGIN}tables\n{bias.END}after\n"
    assert bias.main(["--check", str(file)]) == 0
    file.write_text("no marks\n")
    with pytest.raises(ValueError, match=r"the document has no lines `<!-- bench/bias.py: begin -->`"):
        bias.main(["--write", str(file)])


def test_the_default_credit_and_loss_are_unbiased(bias: ModuleType) -> None:
    credit, loss = RewardsSpec().credit, TrainSpec().loss
    assert (credit.method, loss.kind) == ("turn_return", "dr_grpo")
    assert bias.credit_figures(credit, loss) == pytest.approx(
        {"stop": 1, "stop_unpaid": 1, "right": 1, "stop_even": 0}, rel=1e-12, abs=1e-15
    )


@pytest.mark.parametrize("method", ["outcome", "turn_return"])
def test_a_standard_deviation_turns_the_gradient(bias: ModuleType, method: str) -> None:
    published = read_credit({"method": method, "baseline": "mean", "scale": "std"})
    figures = bias.credit_figures(published, bias.loss_of("reinforce"))
    right = {"outcome": 2.095991, "turn_return": 1.457554}[method]
    expected = {"stop": 2.011773, "stop_unpaid": 1.457554, "right": right, "stop_even": 0.107951}
    assert figures == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("kinds", "stop", "right"),
    [
        (["grpo", "gspo", "sapo"], 0.55, 0.25),
        (["bnpo", "dapo", "ppo", "cispo"], 0.446945, 0.400844),
        (["dr_grpo", "reinforce"], 1.0, 1.0),
    ],
)
def test_what_each_loss_keeps_follows_from_its_division_by_length(
    bias: ModuleType, kinds: list[str], stop: float, right: float
) -> None:
    sampled, true = bias.sample(bias.UNBIASED, bias.PAID), bias.true_gradient(bias.PAID)
    for kind in kinds:
        assert bias.share(bias.gradient(sampled, bias.loss_of(kind)), true) == pytest.approx((stop, right), abs=1e-6)


def test_after_a_first_update_a_ratio_corrects_for_the_tokens_own_probability(bias: ModuleType) -> None:
    """By hand: dr_grpo has the new choice with the old values and visits; reinforce has the old choice as well."""
    stop, right = bias.LATER
    old_stop, old_right = bias.STOP, bias.RIGHT
    figures = bias.loss_figures(bias.loss_of("dr_grpo"))
    assert figures["stop_later"] == pytest.approx((bias.PAID - old_right) / (bias.PAID - right), rel=1e-12)
    assert figures["right_later"] == pytest.approx((1 - old_stop) / (1 - stop), rel=1e-12)


@needs_plugin("credit_methods")
@pytest.mark.parametrize("method", ["outcome", "turn_return", "turn_discount", "mt_grpo", "gigpo", "score", "progress"])
def test_equal_returns_without_a_baseline_are_not_divided_by_their_deviation_of_zero(method: str) -> None:
    from engine.rewards.credit import Member

    group = [Member(ledger=sealed(0.1 + 0.2), state_keys=["start"]), Member(ledger=sealed(0.3), state_keys=["start"])]
    scaled = advantages(group, method=method, baseline="none", scale="std")
    plain = advantages(group, method=method, baseline="none", scale="none")
    assert scaled == plain
    assert plain == [[pytest.approx(0.6 if method == "gigpo" else 0.3)]] * 2


def test_the_longest_possible_episode_follows_from_the_limits() -> None:
    assert LimitsSpec(episode_tokens=4096).tokens_per_episode == 4096
    assert LimitsSpec(assistant_turns=3, turn_tokens=100).tokens_per_episode == 300
    assert LimitsSpec(assistant_turns=None).tokens_per_episode is None
