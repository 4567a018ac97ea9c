"""Notices when a run, an evaluation or a training fails, stalls, diverges, finishes or reaches a budget.

spec.py       the section `notify`
observers.py  what sends events on every channel and repeats none; the observers of runs, evaluations, services and
              trainings, with the thread that sends `stalled` and `budget`
channels.py   webhook, services, command and function
rules.py      its rules of `engine validate`
"""

from engine.plugin import Plugin, Section

PLUGIN = Plugin(
    name="notices",
    about="Notices of runs, evaluations and trainings",
    sections=(Section(keys=("notify",), use="engine.plugins.notices.spec:NotifySpec", resumable=("notify",)),),
    rules=("engine.plugins.notices.rules",),
    hooks={
        "observe_run": "engine.plugins.notices.observers:RunNotices",
        "observe_training": "engine.plugins.notices.observers:TrainingNotices",
        "spec_facts": "engine.plugins.notices.spec:facts",
    },
)
