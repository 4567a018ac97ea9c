"""Supervised fine-tuning on written episodes: `train.kind: sft`.

spec.py            the section `train.data`, the keys of `train` that this kind reads, and its loss
steps.py           the batches of a training
demonstrations.py  the rows: which are trained on, and in which order; row_facts.py: what is read of each before a
training begins
rendered_rows.py   ids of rows of chat APIs, which have messages only
rules.py           its rules of `engine validate`
"""

from engine.plugin import Plugin, Section

PLUGIN = Plugin(
    name="sft",
    needs=("preparing",),
    about="Trains on written episodes",
    sections=(Section(owner="train", keys=("data",), use="engine.plugins.sft.spec:SftDataSpec"),),
    train_kinds={"sft": "engine.plugins.sft.spec:SFT"},
    rules=("engine.plugins.sft.rules",),
)
