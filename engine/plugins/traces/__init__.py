"""Traces of ended episodes, of runs, evaluations and trainings.

spec.py      the section `traces`
writer.py    writes and sends them, in a thread of its own
spans.py     episodes as spans of OpenTelemetry, with their messages
rules.py     its rules of `engine validate`
"""

from engine.plugin import Plugin, Section

PLUGIN = Plugin(
    name="traces",
    about="Traces of ended episodes: spans of OpenTelemetry and lines of JSON",
    sections=(Section(keys=("traces",), use="engine.plugins.traces.spec:TracesSpec", resumable=("traces",)),),
    rules=("engine.plugins.traces.rules",),
    hooks={"observe_episodes": "engine.plugins.traces.writer:observe"},
)
