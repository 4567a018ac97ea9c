"""Rows of other frameworks: read, judged, and stored for looking at and re-scoring. `engine audit` is the command.

`files.py` and `pickles.py` open files from strangers without executing anything; `frameworks/` has one reader for each
framework; `rules.py` has the rules, which read what `examine.py` finds in a row; `store.py` writes rows into a run
store.
"""

from engine.plugin import Plugin

PLUGIN = Plugin(
    name="audit",
    about="Judges training rows that verl, TRL, slime, SkyRL or AReaL made",
    commands={"audit": "engine.plugins.audit.command:audit"},
)
