"""Plots of a training's metrics, as files in its folder `plots`.

plots.py      which metrics each plot has, and the drawing
training.py   draws them when a training ends
"""

from engine.plugin import Plugin

PLUGIN = Plugin(
    name="plots",
    about="Draws the metrics of a training",
    hooks={"observe_training": "engine.plugins.plots.training:observe"},
)
