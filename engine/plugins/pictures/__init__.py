"""Pictures of state machines as SVG: `engine graph --format svg`, and the page of a run in `engine view`."""

from engine.plugin import Plugin

PLUGIN = Plugin(
    name="pictures",
    about="Draws state machines as SVG",
    graph_formats={"svg": "engine.plugins.pictures.draw:svg"},
)
