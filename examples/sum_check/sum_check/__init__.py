"""A plugin with an action of states. Its face imports nothing but the engine's `Plugin`.

spec.py        the section `sum_check`, and the key of `limits`
facts.py       the rows of the action and of its limit in the tables of the engine
action.py      the action `check_sums`; record.py: its journal record
sums.py        finds sums in a text and works them out
tool.py        the tool `check_sums`
spec_facts.py  says that the section gives the model a tool
rules.py       the rule of `engine validate`
"""

from engine.plugin import Plugin, Section

PLUGIN = Plugin(
    name="sum_check",
    about="Checks the sums in a reply, without asking the model",
    install="pip install sum-check",
    sections=(
        Section(keys=("sum_check",), use="sum_check.spec:SumCheckSpec"),
        Section(owner="limits", keys=("sum_checks",), use="sum_check.spec:SumCheckLimits", inline=True),
    ),
    actions={"check_sums": "sum_check.facts:CHECK_SUMS"},
    limits={"sum_checks": "sum_check.facts:SUM_CHECKS"},
    records={"sum_check": "sum_check.record:SumCheckRecord"},
    rules=("sum_check.rules",),
    hooks={"spec_facts": "sum_check.spec_facts:facts"},
)
