"""Stored episodes once more: `engine replay`, `engine rescore`. The core's `Replayer` feeds the records of journals to
episodes.

command.py   `engine replay`, with its forks, and `engine rescore`
rescore.py   other reward rules, applied to journals
"""

from engine.plugin import Plugin

PLUGIN = Plugin(
    name="replay",
    about="Rebuilds stored episodes from their journals, and scores them with other rewards",
    commands={
        "replay": "engine.plugins.replay.command:replay",
        "rescore": "engine.plugins.replay.command:rescore",
    },
)
