"""What is checked about a model's chat template: `engine template`."""

from engine.plugin import Plugin

PLUGIN = Plugin(
    name="templates",
    about="Reports of chat templates: rendering, readers of replies, turns, masks, patches",
    commands={"template": "engine.plugins.templates.command:template"},
)
