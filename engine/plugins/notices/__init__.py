"""Notices when a run, an evaluation or a training fails, stalls, diverges, finishes or reaches a budget.

spec.py       the section `notify`
run.py        notices of runs, evaluations and services
training.py   notices of trainings
notifier.py   sends events on every channel; history.py: what was sent is not repeated
watch.py      the thread that sends `stalled` and `budget`
channels.py   webhook, command and function; robots.py: services
facts.py      the function that gets notices
rules.py      its rules of `engine validate`
"""

from engine.plugin import Plugin, Section

PLUGIN = Plugin(
    name="notices",
    about="Notices of runs, evaluations and trainings",
    sections=(Section(keys=("notify",), use="engine.plugins.notices.spec:NotifySpec", resumable=("notify",)),),
    rules=("engine.plugins.notices.rules",),
    hooks={
        "observe_run": "engine.plugins.notices.run:observe",
        "observe_training": "engine.plugins.notices.training:observe",
        "spec_facts": "engine.plugins.notices.facts:facts",
    },
)
