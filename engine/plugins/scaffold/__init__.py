"""A spec, an environment, replies, scenarios and a test to start from: `engine new`. `templates/` has a folder for each
kind."""

from engine.plugin import Plugin

PLUGIN = Plugin(
    name="scaffold",
    about="Writes a spec, an environment and a test to start from",
    commands={"new": "engine.plugins.scaffold.command:new"},
)
