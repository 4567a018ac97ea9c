"""Which stored episodes a training keeps: `rollout.keep`, `engine compact`.

spec.py        the section `rollout.keep`, and what it means for several drivers
compact.py     the groups that may be dropped, by batch log and checkpoints; the compaction of a run that nobody writes
training.py    drops after each checkpoint, and compacts at the end
command.py     `engine compact`
rules.py       its rule of `engine validate`
"""

from engine.plugin import Plugin, Section

PLUGIN = Plugin(
    name="retention",
    about="Drops stored episodes of a training",
    sections=(
        Section(owner="rollout", keys=("keep",), use="engine.plugins.retention.spec:KeepSpec", resumable=("keep",)),
    ),
    commands={"compact": "engine.plugins.retention.command:compact"},
    rules=("engine.plugins.retention.rules",),
    hooks={
        "observe_training": "engine.plugins.retention.training:observe",
        "spec_facts": "engine.plugins.retention.spec:facts",
    },
)
