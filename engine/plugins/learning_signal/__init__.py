"""What a step of a training can learn from: rewards that reach no token, and why no token has an advantage."""

from engine.plugin import Plugin

PLUGIN = Plugin(
    name="learning_signal",
    about="Warns of a training that has no learning signal, and of rewards that reach no token",
    hooks={"observe_training": "engine.plugins.learning_signal.signal:observe"},
)
