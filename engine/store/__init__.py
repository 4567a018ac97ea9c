"""The run store: journals, trajectories and images in one SQLite file; exports of training rows."""

from engine.store.find import find_run, list_runs
from engine.store.header import RunHeader, new_run_id
from engine.store.images import StoredImage
from engine.store.reading import EpisodeRow
from engine.store.store import RunStore, episode_id_of

__all__ = [
    "EpisodeRow",
    "RunHeader",
    "RunStore",
    "StoredImage",
    "episode_id_of",
    "find_run",
    "list_runs",
    "new_run_id",
]
