"""The memory of a training, by kind, before anything is loaded: `engine plan`."""

from engine.plugin import Plugin

PLUGIN = Plugin(name="plan", about="Plans the memory of a training before anything is loaded")
