"""The layout: ranks downwards, nothing on top of anything else, the same picture every time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.machine.layout import Box, Layout, Link, lay_out


def make(sizes: list[float], edges: list[tuple[int, int]]) -> Layout:
    nodes = {f"n{index}": Box(width, 40.0) for index, width in enumerate(sizes)}
    pairs = dict.fromkeys((a % len(sizes), b % len(sizes)) for a, b in edges)
    links = [Link(f"n{a}", f"n{b}", (60.0, 19.0)) for a, b in pairs if a != b]
    return lay_out(nodes, links, "n0", [f"n{len(sizes) - 1}"])


def everything(layout: Layout) -> list[Box]:
    return [*layout.nodes.values(), *(box for link in layout.links for box in link.waypoints)]


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
            assert apart_x or one.band != other.band
            assert one.band == other.band or one.band[1] <= other.band[0] or other.band[1] <= one.band[0]


@given(graphs)
def test_every_link_goes_down_but_those_that_were_turned_round(layout: Layout) -> None:
    for link in layout.links:
        source, dest = layout.nodes[link.source], layout.nodes[link.dest]
        upper, lower = (dest, source) if link.reversed else (source, dest)
        assert upper.rank < lower.rank
        assert [box.rank for box in link.waypoints] == list(range(upper.rank + 1, lower.rank))
        assert [box.width for box in link.waypoints if box is link.labelled] == [60.0]


@given(graphs)
def test_it_all_lies_inside_the_picture(layout: Layout) -> None:
    for box in everything(layout):
        assert box.x - box.width / 2 >= -1e-6
        assert box.x + box.width / 2 <= layout.width + 1e-6
        assert box.y - box.height / 2 >= -1e-6
        assert box.y + box.height / 2 <= layout.height + 1e-6


@given(
    st.lists(st.floats(40, 200), min_size=1, max_size=6),
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=12),
)
def test_the_same_graph_has_the_same_places(sizes: list[float], edges: list[tuple[int, int]]) -> None:
    first, second = make(sizes, edges), make(sizes, edges)
    assert [(box.x, box.y) for box in everything(first)] == [(box.x, box.y) for box in everything(second)]


def test_a_cycle_is_turned_round_where_it_closes() -> None:
    layout = make([60.0] * 4, [(0, 1), (1, 2), (2, 1), (2, 3)])
    assert [(link.source, link.dest, link.reversed) for link in layout.links] == [
        ("n0", "n1", False),
        ("n1", "n2", False),
        ("n2", "n1", True),
        ("n2", "n3", False),
    ]
    assert [box.rank for box in layout.nodes.values()] == [0, 2, 4, 6]


def test_a_chain_stands_straight_below_itself() -> None:
    layout = make([60.0, 60.0, 60.0], [(0, 1), (1, 2)])
    assert {round(box.x, 6) for box in everything(layout)} == {30.0}
    assert [link.ends for link in layout.links] == [(30.0, 30.0), (30.0, 30.0)]
