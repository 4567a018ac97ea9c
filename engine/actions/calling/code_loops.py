"""The guest loops of a run: one at first, and more after user code has blocked one.

Each time a loop is blocked, the number of loops grows, up to `MAX_LOOPS`, and an episode that lost its loop moves to
another. So blocking code delays fewer and fewer other calls, without knowing in advance which code blocks.
"""

from __future__ import annotations

import asyncio
from zlib import crc32

import structlog

from engine.actions.calling.code_call import EpisodeScope
from engine.actions.calling.code_loop import GuestLoop
from engine.actions.calling.interrupt import Interrupter

log = structlog.get_logger(__name__)

MAX_LOOPS = 64
"""Maximum number of guest loops, not counting blocked ones that were replaced."""
_GROWTH = 4


class GuestLoops:
    """Chooses a loop for each asynchronous call. Used only in the main loop's thread."""

    def __init__(self, interrupter: Interrupter) -> None:
        self._interrupter = interrupter
        self._loops: dict[int, GuestLoop] = {}
        self._most = 1

    def choose(self, scope: EpisodeScope | None, tries: int = 0) -> GuestLoop:
        """Choose a loop for a call that is not bound to one; not a blocked one, if another is available.

        Args:
            scope: Scope of the episode.
            tries: How often this call has lost its loop.
        """
        found = self._loops.get(0)
        if self._most == 1 and found is not None and not found.blocks and found.main is asyncio.get_running_loop():
            return found
        first = 0
        if scope is not None:
            first = crc32(f"{scope.episode}/{scope.losses + tries}".encode())
        for grown in (False, True):
            for shift in range(self._most):
                guest = self._at((first + shift) % self._most)
                if not guest.blocks:
                    return guest
            if not grown:
                self._grow()
        return self._at(first % self._most)

    def _at(self, place: int) -> GuestLoop:
        guest = self._loops.get(place)
        if (
            guest is not None and guest.main is not asyncio.get_running_loop()
        ):  # it belongs to another run, which has ended
            guest.close()
            guest = None
        if guest is None:
            guest = self._loops[place] = GuestLoop(self._replace, self._interrupter)
        return guest

    def _grow(self) -> None:
        self._most = min(MAX_LOOPS, self._most * _GROWTH)

    def _replace(self, guest: GuestLoop) -> None:
        self._loops = {place: other for place, other in self._loops.items() if other is not guest}
        self._grow()
        guest.close()
        lost = guest.drop()
        log.warning("a blocked event loop was replaced", lost_calls=lost, loops=self._most)

    def close(self) -> None:
        """End the loops. Blocked ones end with the process."""
        for guest in self._loops.values():
            guest.close()
        for guest in self._loops.values():
            guest.join()
        self._loops = {}
