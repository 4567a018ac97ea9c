"""The episodes of a store that are being written: where the journal of each is, and whether it takes another entry."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from engine.errors import StoreError
from engine.store.writer import Track


class Tracks:
    """Tracks by episode id. Only one caller at a time may begin, end or begin again an episode."""

    def __init__(self) -> None:
        self._tracks: dict[str, Track] = {}
        self._beginning: set[str] = set()

    @contextmanager
    def beginning(self, episode_id: str) -> Iterator[None]:
        """Hold an episode's place while it is begun.

        Raises:
            StoreError: it is running already.
        """
        if episode_id in self._tracks or episode_id in self._beginning:
            raise StoreError(f"{episode_id} is running already")
        self._beginning.add(episode_id)
        try:
            yield
        finally:
            self._beginning.discard(episode_id)

    def set(self, episode_id: str, track: Track) -> None:
        """Set where the next entry of an episode is written."""
        self._tracks[episode_id] = track

    def end(self, episode_id: str) -> None:
        """Forget an episode: it is finished."""
        del self._tracks[episode_id]

    def get(self, episode_id: str, seq: int | None = None) -> Track:
        """Return the track of an episode that can be written.

        Args:
            episode_id: The episode.
            seq: The number of the entry that is to be written, if one is.

        Raises:
            StoreError: it is not running, an earlier write failed, its last write is running, or the entry is not its next.
        """
        track = self._tracks.get(episode_id)
        if track is None:
            raise StoreError(f"{episode_id} is not running: begin it first")
        if track.broken is not None:
            raise StoreError(f"{episode_id} takes no more entries: {track.broken}")
        if track.closing:
            raise StoreError(f"{episode_id} is being finished or begun again")
        if seq is not None and seq != track.next:
            raise StoreError(f"{episode_id}: entry {seq} was given, but the next entry is {track.next}")
        return track

    @contextmanager
    def giving_up(self, episode_id: str, track: Track) -> Iterator[None]:
        """Mark a track while its last write is running: it accepts no other, and after a cancellation its content is unknown."""
        track.closing = True
        try:
            yield
        except asyncio.CancelledError:
            self._tracks.pop(episode_id, None)
            raise
        finally:
            track.closing = False
