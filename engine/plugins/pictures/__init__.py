"""Pictures of state machines: `engine graph`, and the page of a run in `engine view`.

command.py   `engine graph`
graph.py     a machine -> boxes and arrows, and Mermaid text
draw.py      their places, and SVG
"""

from engine.plugin import Plugin

PLUGIN = Plugin(
    name="pictures",
    about="Draws state machines, as Mermaid text and as SVG",
    commands={"graph": "engine.plugins.pictures.command:graph"},
    graph_formats={"svg": "engine.plugins.pictures.draw:svg"},
)
