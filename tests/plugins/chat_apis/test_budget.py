"""Costs by token, and the file that adds them up."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner

from engine.cli.main import app
from engine.plugins.chat_apis.budget import Budget, BudgetError, Usage
from engine.plugins.chat_apis.spec import PricesSpec


@pytest.mark.parametrize(
    ("prices", "cost"),
    [
        (PricesSpec(input=2, output=8), 1000 * 2 + 100 * 8),
        (PricesSpec(input=2, output=8, cached=0.5), 400 * 2 + 600 * 0.5 + 100 * 8),
        (PricesSpec(input=2, output=8, cached=0, cache_write=2.5), 300 * 2 + 100 * 2.5 + 100 * 8),
    ],
)
def test_each_kind_of_token_has_its_price(prices: PricesSpec, cost: float) -> None:
    assert Usage(prompt=1000, cached=600, cache_write=100, output=100).cost(prices) == pytest.approx(
        cost / 1e6, rel=1e-12
    )


def test_a_resume_counts_what_was_spent_before_and_a_cut_line_hides_no_other(tmp_path: Path) -> None:
    path = tmp_path / "costs.jsonl"
    with closing(Budget(path, 1.0)) as budget:
        budget.charge(0.25, Usage(), episode="e", turn=0)
        budget.check()
    path.write_bytes(path.read_bytes() + b'{"cost": 0.2')
    with closing(Budget(path, 1.0)) as budget:
        assert budget.spent == 0.25
        budget.charge(0.75, Usage())
        with pytest.raises(BudgetError, match=r"has cost 1 of at most 1 \(`rollout\.max_cost`\)"):
            budget.check()
    with closing(Budget(path, None)) as budget:
        assert budget.spent == 1.0
        budget.check()
    assert path.stat().st_mode & 0o777 == 0o600


def test_two_that_count_in_one_file_have_one_limit(tmp_path: Path) -> None:
    with (
        closing(Budget(tmp_path / "costs.jsonl", 1.0)) as training,
        closing(Budget(tmp_path / "costs.jsonl", 1.0)) as evaluation,
    ):
        training.charge(0.25, Usage())
        evaluation.charge(0.75, Usage())
        with pytest.raises(BudgetError):
            training.check()
        assert (training.spent, evaluation.spent) == (1.0, 1.0)


def test_the_old_option_is_refused_with_the_new_form() -> None:
    answer = CliRunner().invoke(app, ["run", "spec.yaml", "--max-cost", "1"])
    told = "there is no option `engine run --max-cost`: write `engine run SPEC --set rollout.max_cost=N`"
    assert (answer.exit_code, told in answer.output) == (2, True)
