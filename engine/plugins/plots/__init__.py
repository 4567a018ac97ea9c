"""Plots of a training's metrics, as files in its folder `plots`."""

from engine.plugin import Plugin

PLUGIN = Plugin(
    name="plots",
    about="Draws the metrics of a training",
    hooks={"observe_training": "engine.plugins.plots.plots:observe"},
)
