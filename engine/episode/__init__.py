"""One episode: its live state (`episode.py`), what all episodes of a spec share (`compiled.py`), and what drives one
(`executor.py`)."""
