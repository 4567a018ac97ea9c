"""Evaluations: success by turn, pass@k and rewards, with intervals: `engine eval`, `train.eval`.

spec.py        the section `train.eval`, and what it means for other parts of a spec
command.py     `engine eval`; trained_model.py: the model that a training produced, with an adapter merged in
measures.py    the measures of finished episodes; intervals.py: their 95 % intervals
training.py    evaluations during a training
rules.py       its rules of `engine validate`
"""

from engine.plugin import Plugin, Section

PLUGIN = Plugin(
    name="evaluation",
    about="Evaluations of a model or of a training, with intervals",
    sections=(
        Section(owner="train", keys=("eval",), use="engine.plugins.evaluation.spec:TrainEvalSpec", resumable=("eval",)),
    ),
    commands={"eval": "engine.plugins.evaluation.command:evaluate"},
    old_options={"eval --format": "engine eval SPEC --json"},
    rules=("engine.plugins.evaluation.rules",),
    hooks={
        "evaluate_training": "engine.plugins.evaluation.training:evaluator",
        "spec_facts": "engine.plugins.evaluation.spec:facts",
    },
)
