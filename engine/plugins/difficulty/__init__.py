"""The difficulty filter: tasks that the policy always or never solves are drawn less often.

spec.py       the section `train.difficulty`
draws.py      solve rates, and the draws that they skip
rules.py      its rule of `engine validate`
"""

from engine.plugin import Plugin, Section

PLUGIN = Plugin(
    name="difficulty",
    about="Draws tasks less often that the policy always or never solves",
    sections=(Section(owner="train", keys=("difficulty",), use="engine.plugins.difficulty.spec:DifficultySpec"),),
    rules=("engine.plugins.difficulty.rules",),
    hooks={
        "filter_draws": "engine.plugins.difficulty.draws:draw_filter",
        "spec_facts": "engine.plugins.difficulty.spec:facts",
    },
)
