"""Looking at stored runs and trainings: `engine show` and `engine compare`."""

from engine.plugin import Plugin

PLUGIN = Plugin(
    name="show",
    about="Shows and compares the episodes of runs and trainings in a terminal",
    commands={
        "show": "engine.plugins.show.command:show",
        "compare": "engine.plugins.show.compare_command:compare",
    },
)
