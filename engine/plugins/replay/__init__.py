"""Stored episodes once more, without a model: `engine replay`, `engine rescore`. No backend and no executor is imported.

replayer.py          feeds the records of journals to episodes, and compares the results with the stored ones
command.py           `engine replay`; fork.py: a run that shares another one's journals up to a turn
rescore.py           other reward rules, applied to journals
rescore_command.py   `engine rescore`
"""

from engine.plugin import Plugin

PLUGIN = Plugin(
    name="replay",
    about="Rebuilds stored episodes from their journals, and scores them with other rewards",
    commands={
        "replay": "engine.plugins.replay.command:replay",
        "rescore": "engine.plugins.replay.rescore_command:rescore",
    },
)
