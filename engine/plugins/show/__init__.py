"""Looking at stored runs and trainings: `engine show`."""

from engine.plugin import Plugin

PLUGIN = Plugin(
    name="show",
    about="Shows the episodes of runs and trainings in a terminal",
    commands={"show": "engine.plugins.show.command:show"},
)
