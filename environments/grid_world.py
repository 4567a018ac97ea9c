"""A grid world that the model sees as pictures: walk to the goal around walls, one step in each turn.

`problems` makes the tasks. `GridWorld` draws the grid after each step and names the agent's cell in the fact `cell`,
which is a state key for GiGPO: turns of a group that began in the same cell are compared.

Invariant: a task's grid is a pure function of the arguments of `problems`, its goal can be reached, and the picture is
a pure function of the grid and the agent's cell.
"""

from __future__ import annotations

import random
import re
from collections import deque
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from engine.schemas.environment import EpisodeView, Reset, Step, Task
from engine.schemas.message import ImagePart, Message, TextPart, image_part
from engine.schemas.reward import RewardEvent

HELD_OUT = 5
"""One grid in this many is held out."""
MOVES = {"up": (0, -1), "down": (0, 1), "left": (-1, 0), "right": (1, 0)}

_MOVE = re.compile(r"<move>\s*([a-z]+)\s*</move>", re.IGNORECASE)
_COLORS = {"#": (70, 70, 80), ".": (245, 245, 240), "G": (60, 170, 80)}
_AGENT, _LINE = (50, 90, 220), (190, 190, 190)

Cell = tuple[int, int]
"""Column and row, from 0 at the top left."""


def problems(
    count: int = 64, seed: int = 0, size: int = 5, walls: float = 0.25, held_out: bool = False
) -> Iterator[dict[str, Any]]:
    """Rows with `id`, `grid` and `shortest`, the same for the same arguments.

    `grid` has one text for each row of cells: `#` is a wall, `.` is free, `A` is the agent's first cell, `G` is the
    goal. `shortest` is the number of steps of the shortest way.

    Args:
        count: How many.
        seed: Seeds the grids.
        size: Columns and rows, from 3.
        walls: The part of the cells that are walls, from 0 to 0.5.
        held_out: Make grids that are kept from training, instead of the others.
    """
    if size < 3 or not 0 <= walls <= 0.5:
        raise ValueError(f"size is {size} and walls is {walls}; write size from 3 and walls from 0 to 0.5")
    rng = random.Random(f"grid_world/{seed}")
    cells = [(column, row) for row in range(size) for column in range(size)]
    for index in range(count):
        while True:
            agent, goal, *others = rng.sample(cells, len(cells))
            marks = dict.fromkeys(others[: round(walls * len(cells))], "#") | {agent: "A", goal: "G"}
            rows = ["".join(marks.get((column, row), ".") for column in range(size)) for row in range(size)]
            shortest = Grid.read(rows).distance(agent)
            reserved = random.Random("/".join(rows)).randrange(HELD_OUT) == 0
            if shortest is not None and shortest >= 2 and reserved is held_out:
                break
        yield {"id": f"{'held-out' if held_out else 'grid'}-{seed}-{index:04d}", "grid": rows, "shortest": shortest}


class Grid(NamedTuple):
    """The cells of a grid, without the agent."""

    rows: tuple[str, ...]
    start: Cell
    goal: Cell

    @classmethod
    def read(cls, rows: object) -> Grid:
        """Read rows of cells.

        Raises:
            ValueError: They are not rows of equal length from `#`, `.`, one `A` and one `G`.
        """
        lines = [row for row in rows if isinstance(row, str)] if isinstance(rows, list) else []
        joined = "".join(lines)
        even = isinstance(rows, list) and len(lines) == len(rows) and len({len(line) for line in lines}) == 1
        if not even or set(joined) - set("#.AG") or len(joined) > 4096:
            raise ValueError("write rows of the same length from `#`, `.`, `A` and `G`, with at most 4096 cells")
        if joined.count("A") != 1 or joined.count("G") != 1:
            raise ValueError("write one `A` (the agent) and one `G` (the goal)")
        wide = len(lines[0])
        start, goal = ((joined.index(mark) % wide, joined.index(mark) // wide) for mark in "AG")
        return cls(tuple(line.replace("A", ".") for line in lines), start, goal)

    def free(self, cell: Cell) -> bool:
        """Whether a cell is in the grid and no wall."""
        column, row = cell
        return 0 <= row < len(self.rows) and 0 <= column < len(self.rows[0]) and self.rows[row][column] != "#"

    def distance(self, start: Cell) -> int | None:
        """Steps of the shortest way from a cell to the goal; None if there is none."""
        steps = {start: 0}
        queue = deque([start])
        while queue:
            cell = queue.popleft()
            if cell == self.goal:
                return steps[cell]
            for right, down in MOVES.values():
                near = cell[0] + right, cell[1] + down
                if near not in steps and self.free(near):
                    steps[near] = steps[cell] + 1
                    queue.append(near)
        return None

    def text(self, agent: Cell) -> str:
        """The grid with the agent, one line for each row."""
        return "\n".join(
            "".join("A" if (column, row) == agent else mark for column, mark in enumerate(line))
            for row, line in enumerate(self.rows)
        )


@lru_cache(maxsize=1024)
def picture(grid: Grid, agent: Cell, cell: int) -> ImagePart:
    """The grid as an RGB picture, a PNG: walls dark, the goal a green square, the agent a blue disc.

    Args:
        grid: The cells.
        agent: Where the agent stands.
        cell: Side of a cell in pixels.
    """
    from PIL import Image, ImageDraw

    canvas = Image.new("RGB", (cell * len(grid.rows[0]), cell * len(grid.rows)), _COLORS["."])
    draw = ImageDraw.Draw(canvas)
    for row, line in enumerate(grid.rows):
        for column, mark in enumerate(line):
            left, top = column * cell, row * cell
            draw.rectangle((left, top, left + cell - 1, top + cell - 1), fill=_COLORS[mark], outline=_LINE)
    left, top = agent[0] * cell, agent[1] * cell
    margin = cell // 5
    draw.ellipse((left + margin, top + margin, left + cell - 1 - margin, top + cell - 1 - margin), fill=_AGENT)
    return image_part(canvas)


class GridWorld:
    """Walks the agent through one grid.

    Args:
        show: `image` draws the grid, `text` writes it, for models that take no images.
        cell: Side of a cell in pixels.
        moves: Replies until the walk ends. A reply without a move counts too.
        goal: Reward `goal` of the step that reaches the goal.
        step: Reward `step` of every reply.
        bump: Reward `bump` of a step into a wall or out of the grid, which moves nothing.
        unreadable: Reward `format` of a reply without one of the four moves.
    """

    events = ("moved", "over")

    def __init__(
        self,
        show: Literal["image", "text"] = "image",
        cell: int = 16,
        moves: int = 12,
        goal: float = 1.0,
        step: float = -0.02,
        bump: float = -0.05,
        unreadable: float = -0.1,
    ) -> None:
        if show not in ("image", "text") or cell < 8 or moves < 1:
            raise ValueError(
                f"show is {show!r}, cell {cell}, moves {moves}; write image or text, at least 8, at least 1"
            )
        self._show = show
        self._cell = cell
        self._moves = moves
        self._rewards = {"goal": goal, "step": step, "bump": bump, "format": unreadable}

    def reset(self, task: Task, seed: int) -> Reset:
        """The rules and the grid, as the user's first message."""
        grid = _grid(task)
        kind = "The blue disc is you, the green square is the goal, dark cells are walls."
        if self._show == "text":
            kind = "A is you, G is the goal, # is a wall."
        words = f"{kind} Move one cell: <move>up</move>, down, left or right."
        return Reset(messages=[self._shown(grid, grid.start, words)], facts=_facts(grid.start, 0, False))

    def step(self, view: EpisodeView) -> Step:
        """Move the agent. `over` at the goal and after the last move."""
        grid = _grid(view.task)
        column, row = (int(part) for part in str(view.facts["cell"]).split(","))
        moves = int(view.facts["moves"]) + 1
        moves_named = _MOVE.findall(view.reply)
        move = moves_named[-1].lower() if moves_named else ""
        paid, agent, words = [("step", f"move {moves}")], (column, row), "You moved."
        if move not in MOVES:
            paid.append(("format", "no move"))
            words = "There is no move. Write <move>up</move>, or down, left, right."
        elif not grid.free(there := (column + MOVES[move][0], row + MOVES[move][1])):
            paid.append(("bump", f"{move} of {column},{row} is no free cell"))
            words = "You cannot go there."
        else:
            agent = there
        solved = agent == grid.goal
        if solved:
            paid.append(("goal", f"reached in {moves} moves"))
        rewards = [
            RewardEvent(name=name, value=self._rewards[name], cause=cause)
            for name, cause in paid
            if self._rewards[name]
        ]
        facts = _facts(agent, moves, solved)
        if solved or moves >= self._moves:
            return Step(event="over", rewards=rewards, facts=facts)
        return Step(event="moved", messages=[self._shown(grid, agent, words)], rewards=rewards, facts=facts)

    def _shown(self, grid: Grid, agent: Cell, words: str) -> Message:
        if self._show == "text":
            return Message(role="user", content=f"{grid.text(agent)}\n{words}")
        return Message(role="user", content=[picture(grid, agent, self._cell), TextPart(text=words)])


def _facts(agent: Cell, moves: int, solved: bool) -> dict[str, Any]:
    return {"cell": f"{agent[0]},{agent[1]}", "moves": moves, "solved": solved}


def _grid(task: Task) -> Grid:
    """The task's grid.

    Raises:
        ValueError: It is missing or cannot be read.
    """
    try:
        return Grid.read(task.fields.get("grid"))
    except ValueError as problem:
        raise ValueError(
            f"task {task.id!r}: `grid`: {problem}, as `engine.environments.grid_world:problems` does"
        ) from None
