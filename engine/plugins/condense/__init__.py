"""Condensing: how a conversation that has become too long is shown to the model in fewer tokens.

spec.py        the section `condense`, and its keys of `limits`
facts.py       the rows of its actions and its limit in the tables of the core
spec_facts.py  what the section means for other parts of a spec, such as the states that it adds
action.py      the actions `condense` and `ask_summary`
chunks.py      the parts of a thread, their keywords, and what stands for them; the window of images, and when the
               conversation must be condensed
record.py      their journal record, and the tool `expand`
rules.py       its rules of `engine validate`
"""

from engine.plugin import Plugin, Section

PLUGIN = Plugin(
    name="condense",
    about="Shorter conversations",
    needs=("roles",),
    sections=(
        Section(keys=("condense",), use="engine.plugins.condense.spec:CondenseSpec"),
        Section(
            owner="limits",
            keys=("on_overflow", "condensations"),
            use="engine.plugins.condense.spec:CondenseLimits",
            inline=True,
        ),
    ),
    actions={
        "condense": "engine.plugins.condense.facts:CONDENSE",
        "ask_summary": "engine.plugins.condense.facts:ASK_SUMMARY",
    },
    limits={"condensations": "engine.plugins.condense.facts:CONDENSATIONS"},
    records={"condense": "engine.plugins.condense.record:CondenseRecord"},
    rules=("engine.plugins.condense.rules",),
    hooks={"spec_facts": "engine.plugins.condense.spec_facts:facts"},
)
