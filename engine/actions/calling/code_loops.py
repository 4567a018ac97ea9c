"""An episode -> the code loop that runs its calls: one for all episodes, and another after code has blocked one.

Each time a loop is blocked, the number of loops grows, up to `MAX_LOOPS`, and an episode that lost its loop moves to
another. So blocking code delays fewer and fewer other calls, without knowing in advance which code blocks.
"""

from __future__ import annotations

import asyncio
from zlib import crc32

import structlog

from engine.actions.calling.code_call import EpisodeScope
from engine.actions.calling.code_loop import CodeLoop
from engine.actions.calling.interrupt import Interrupter

log = structlog.get_logger(__name__)

MAX_LOOPS = 64
"""Maximum number of code loops, not counting blocked ones that were replaced."""
_GROWTH = 4


class CodeLoops:
    """Chooses a loop for each asynchronous call. Used only in the main loop's thread."""

    def __init__(self, interrupter: Interrupter) -> None:
        self._interrupter = interrupter
        self._loops: dict[int, CodeLoop] = {}
        self._most = 1

    def choose(self, scope: EpisodeScope | None, tries: int = 0) -> CodeLoop:
        """Choose a loop for a call that is not bound to one; not a blocked one, if another is available.

        Args:
            scope: Scope of the episode.
            tries: How often this call has lost its loop.
        """
        only = self._loops.get(0) if self._most == 1 else None
        if only is not None and not (only.warned and only.blocks) and only.main is asyncio.get_running_loop():
            return only
        first = 0
        if scope is not None:
            first = crc32(f"{scope.episode}/{scope.losses + tries}".encode())
        for grown in (False, True):
            for shift in range(self._most):
                code_loop = self._at((first + shift) % self._most)
                if not code_loop.blocks:
                    return code_loop
            if not grown:
                self._grow()
        return self._at(first % self._most)

    def _at(self, place: int) -> CodeLoop:
        code_loop = self._loops.get(place)
        if (
            code_loop is not None and code_loop.main is not asyncio.get_running_loop()
        ):  # it belongs to another run, which has ended
            code_loop.close()
            code_loop = None
        if code_loop is None:
            code_loop = self._loops[place] = CodeLoop(self._replace, self._interrupter)
        return code_loop

    def _grow(self) -> None:
        self._most = min(MAX_LOOPS, self._most * _GROWTH)

    def _replace(self, code_loop: CodeLoop) -> None:
        self._loops = {place: other for place, other in self._loops.items() if other is not code_loop}
        self._grow()
        code_loop.close()
        lost = code_loop.drop()
        log.warning("a blocked event loop was replaced", lost_calls=lost, loops=self._most)

    def close(self) -> None:
        """End the loops. Blocked ones end with the process."""
        for code_loop in self._loops.values():
            code_loop.close()
        for code_loop in self._loops.values():
            code_loop.join()
        self._loops = {}
