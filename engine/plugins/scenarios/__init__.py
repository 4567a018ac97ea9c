"""Scenarios, the tests of a spec: scripted episodes, their expected results, and the transitions that they take."""

from engine.plugin import Plugin

PLUGIN = Plugin(
    name="scenarios",
    about="Plays scripted episodes without a model and compares their results",
    commands={"test": "engine.plugins.scenarios.command:test"},
    old_options={"test --format": "engine test PATH --json"},
    schemas={"scenarios": "engine.plugins.scenarios.schema:ScenarioFile"},
    hooks={
        "examine_file": "engine.plugins.scenarios.load:scenario_problems",
        "record_scenario": "engine.plugins.scenarios.recorded:record_scenario",
    },
)
