"""Condensing: how a conversation that has become too long is shown to the model in fewer tokens."""

from engine.plugin import Plugin

PLUGIN = Plugin(name="condense", about="Shorter conversations")
