"""A credit method by entry point."""

from __future__ import annotations

from pathlib import Path

import pytest
from credit_kit import sealed

from engine.errors import LedgerError
from engine.rewards.credit import credit
from engine.schemas.credit import EntryCredit
from engine.spec.code.entry import EntryError

HERE = Path(__file__).parent
GROUP = [sealed(1.0, 2.0), sealed(3.0)]


def test_a_method_of_ones_own_is_called_with_its_arguments() -> None:
    spec = EntryCredit(use="credit_of_my_own:last_takes_all", with_={"factor": 2.0})
    assert [values.tolist() for values in credit(spec, GROUP, base=HERE)] == [[0.0, 6.0], [6.0]]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("raises", "failed: KeyError: 'no such thing'"),
        ("too_few", "returned arrays for 1 episodes; the group has 2"),
        ("nan", "must return 2 finite numbers for episode 0 of the group"),
    ],
)
def test_nonsense_is_a_typed_failure(name: str, words: str) -> None:
    with pytest.raises(LedgerError, match=words) as caught:
        credit(EntryCredit(use=f"credit_of_my_own:{name}"), GROUP, base=HERE)
    assert caught.value.blame == "spec"


def test_a_method_that_is_not_there_is_named() -> None:
    with pytest.raises(EntryError, match="`credit_of_my_own` has no `last_takes_al`"):
        credit(EntryCredit(use="credit_of_my_own:last_takes_al"), GROUP, base=HERE)
