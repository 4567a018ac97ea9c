"""A plugin with a loss. Its face imports nothing but the engine's `Plugin`."""

from engine.plugin import Plugin

PLUGIN = Plugin(
    name="tilt",
    about="A loss in which tokens with a high ratio count more",
    install="pip install tilt-loss",
    losses={"tilt": "tilt_loss.spec:TiltLoss"},
    rules=("tilt_loss.rules",),
)
