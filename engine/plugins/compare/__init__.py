"""Two runs of the same tasks, paired by task: `engine compare`, and the comparison of `engine view`."""

from engine.plugin import Plugin

PLUGIN = Plugin(
    name="compare",
    about="Compares two runs of the same tasks",
    needs=("evaluation", "show"),
    commands={"compare": "engine.plugins.compare.command:compare"},
    old_options={"compare --format": "engine compare FIRST SECOND --json"},
)
