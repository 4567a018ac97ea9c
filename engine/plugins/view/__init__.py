"""The web app of `engine view`, and its single file."""

from engine.plugin import Plugin

PLUGIN = Plugin(
    name="view",
    about="Shows runs and trainings in a browser: episodes, tokens, rewards, curves",
    needs=("compare", "show"),
    hooks={"observe_training": "engine.plugins.view.training_notes:TrainingNotes"},
    commands={"view": "engine.plugins.view.command:view"},
)
