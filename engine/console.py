"""The console on which commands print. Text of models, tools and files cannot send commands to the terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from engine.masking import mask
from engine.terminal import visible


class SafeConsole(Console):
    """Escapes the text of everything that is rendered; control sequences of rich's own, such as colours, pass.

    Strings and `Text` are escaped before they are laid out, so that columns stay aligned. `Text` drops BEL, BS, VT, FF
    and CR itself when it is constructed: to show those, construct it from `visible(text)`.
    """

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(visible(mask(text)), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        if isinstance(renderable, Text) and (plain := visible(mask(renderable.plain))) != renderable.plain:
            renderable = renderable.blank_copy(plain)  # without spans, whose places no longer hold
        for segment in super().render(renderable, options):
            if segment.control or (text := visible(segment.text)) == segment.text:
                yield segment
            else:
                yield Segment(text, segment.style)


def make_console(*, stderr: bool = False, soft_wrap: bool = False) -> SafeConsole:
    """A console that prints strings as they are: no markup, no highlighting, no emoji codes.

    Args:
        stderr: Print on stderr.
        soft_wrap: Do not break lines at the terminal's width.
    """
    return SafeConsole(stderr=stderr, soft_wrap=soft_wrap, markup=False, highlight=False, emoji=False)
