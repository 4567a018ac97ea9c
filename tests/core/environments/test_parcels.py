"""The sorting office: each turn is right or wrong for itself, and nothing says which gate a town has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from engine.environments.parcels import GATES, ParcelEnvironment, ParcelUser, problems
from engine.schemas.environment import Environment, EpisodeView, Task, User, UserTurn
from engine.schemas.reward import RewardEvent

View = Callable[..., EpisodeView]


def task(*towns: object) -> Task:
    return Task(id="t", index=0, fields={"towns": list(towns)})


def test_they_fit_their_protocols() -> None:
    assert isinstance(ParcelEnvironment(), Environment)
    assert isinstance(ParcelUser(), User)


def test_every_gate_has_as_many_towns() -> None:
    assert Counter(GATES.values()) == {"A": 2, "B": 2, "C": 2, "D": 2}


def test_problems_are_the_same_for_the_same_arguments() -> None:
    assert list(problems(2, seed=3, parcels=3)) == [
        {"id": "parcels-3-0000", "towns": ["Cork", "Cork", "Oslo"]},
        {"id": "parcels-3-0001", "towns": ["Cork", "Riga", "Turku"]},
    ]


def test_every_town_comes_about_as_often() -> None:
    counts = Counter(town for row in problems(500) for town in row["towns"])
    assert sorted(counts) == sorted(GATES)
    assert min(counts.values()) > 200


def test_the_office_brings_the_first_parcel_and_names_no_gate() -> None:
    (message,) = ParcelEnvironment().reset(task("Lyon", "Oslo"), 0).messages
    assert (message.role, message.content) == ("user", "Parcel for Lyon.")


def paid(value: float, cause: str) -> list[RewardEvent]:
    return [RewardEvent(name="parcel", value=value, cause=cause)]


def test_a_parcel_is_sent_and_the_next_one_comes(view: View) -> None:
    assert ParcelUser().respond(view(task("Lyon", "Oslo"), "Lyon B")) == UserTurn(
        content="Sent. Parcel for Oslo.", rewards=paid(1.0, "Lyon goes through B"), facts={"judged": 1, "sent": 1}
    )


@pytest.mark.parametrize("reply", ["Lyon A", "Oslo D", "B", "Lyon B.", "Lyon B\nOslo D", ""])
def test_any_other_reply_loses_it(view: View, reply: str) -> None:
    assert ParcelUser(sent=0.25, lost=-0.25).respond(view(task("Lyon", "Oslo"), reply)) == UserTurn(
        content="Lost. Parcel for Oslo.",
        rewards=paid(-0.25, f"Lyon goes through B, not {reply!r}"),
        facts={"judged": 1, "sent": 0},
    )


@pytest.mark.parametrize(("reply", "sent", "solved"), [("Oslo D", 2, True), ("Oslo A", 1, False)])
def test_the_last_parcel_ends_it(view: View, reply: str, sent: int, solved: bool) -> None:
    said = ParcelUser().respond(view(task("Lyon", "Oslo"), "Lyon B", reply, facts={"judged": 1, "sent": 1}))
    assert (said.satisfied, said.solved, said.facts) == (True, solved, {"judged": 2, "sent": sent})


def test_which_parcel_it_is_follows_from_those_judged(view: View) -> None:
    """A call that cannot be read is answered in the clerk's place, and the same parcel is still there."""
    said = ParcelUser().respond(view(task("Lyon", "Oslo"), "<call>", "Lyon B"))
    assert said.facts == {"judged": 1, "sent": 1}


@pytest.mark.parametrize("towns", [[], ["Atlantis"], ["Lyon", 3]])
def test_a_task_must_have_towns_with_gates(towns: list[object]) -> None:
    with pytest.raises(ValueError, match="write a list of some of Bern, Cork"):
        ParcelEnvironment().reset(task(*towns), 0)
