"""The layout: ranks downwards, nothing on top of anything else, the same picture every time."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import EngineError
from engine.plugins.pictures.draw import Box, Link, lay_out, svg
from engine.schemas.machine import MachineSpec


class Layout(NamedTuple):
    nodes: dict[str, Box]
    links: list[Link]
    width: float
    height: float


def make(sizes: list[float], edges: list[tuple[int, int]]) -> Layout:
    nodes = {f"n{index}": Box(width, 40.0) for index, width in enumerate(sizes)}
    pairs = dict.fromkeys((a % len(sizes), b % len(sizes)) for a, b in edges)
    links = [Link(f"n{a}", f"n{b}", Box(60.0, 19.0)) for a, b in pairs if a != b]
    return Layout(nodes, links, *lay_out(nodes, links, "n0"))


def everything(layout: Layout) -> list[Box]:
    return [*layout.nodes.values(), *(box for link in layout.links for box in link.points)]


graphs = st.builds(
    make,
    st.lists(st.floats(40, 200), min_size=1, max_size=8),
    st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=16),
)


@given(graphs)
def test_no_box_lies_on_another(layout: Layout) -> None:
    boxes = everything(layout)
    for index, one in enumerate(boxes):
        for other in boxes[index + 1 :]:
            apart_x = abs(one.x - other.x) >= (one.width + other.width) / 2 - 1e-6
            same_rank = (one.top, one.bottom) == (other.top, other.bottom)
            assert apart_x or not same_rank
            assert same_rank or one.bottom <= other.top or other.bottom <= one.top


@given(graphs)
def test_every_link_goes_down_through_its_label(layout: Layout) -> None:
    for link in layout.links:
        source, dest = layout.nodes[link.source], layout.nodes[link.dest]
        upper, lower = (dest, source) if link.upwards else (source, dest)
        heights = [box.top for box in (upper, *link.points, lower)]
        assert all(above < below for above, below in pairwise(heights))
        assert [box is link.label for box in link.points].count(True) == 1


@given(graphs)
def test_only_links_on_a_cycle_go_upwards(layout: Layout) -> None:
    steps = {(link.source, link.dest) for link in layout.links}
    for link in layout.links:
        if link.upwards:
            seen = {link.dest}
            for _ in layout.nodes:
                seen |= {dest for source, dest in steps if source in seen}
            assert link.source in seen


@given(graphs)
def test_it_all_lies_inside_the_picture(layout: Layout) -> None:
    for box in everything(layout):
        assert box.x - box.width / 2 >= -1e-6
        assert box.x + box.width / 2 <= layout.width + 1e-6
        assert box.y - box.height / 2 >= -1e-6
        assert box.y + box.height / 2 <= layout.height + 1e-6


def test_every_process_draws_the_same_picture() -> None:
    code = (
        "from engine.plugins.pictures.draw import svg; from engine.schemas.machine import MachineSpec; "
        "print(svg(MachineSpec(preset='tools_and_user')))"
    )
    other = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": "1"},  # strings have other hashes here
        capture_output=True,
        text=True,
        check=True,
    )
    assert other.stdout == svg(MachineSpec(preset="tools_and_user")) + "\n"


def test_a_cycle_is_turned_round_where_it_closes() -> None:
    layout = make([60.0] * 4, [(0, 1), (1, 2), (2, 1), (2, 3)])
    assert [(link.source, link.dest, link.upwards) for link in layout.links] == [
        ("n0", "n1", False),
        ("n1", "n2", False),
        ("n2", "n1", True),
        ("n2", "n3", False),
    ]
    assert [box.y for box in layout.nodes.values()] == sorted(box.y for box in layout.nodes.values())


def test_a_chain_stands_straight_below_itself() -> None:
    layout = make([60.0, 60.0, 60.0], [(0, 1), (1, 2)])
    assert {round(box.x, 6) for box in everything(layout)} == {30.0}


def test_without_the_library_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fast_sugiyama", None)
    with pytest.raises(EngineError, match=r"`pip install fast-sugiyama`, or write Mermaid with `--format mermaid`"):
        make([60.0], [])
