"""LoRA: low-rank matrices beside frozen layers are trained instead of the weights, by peft.

spec.py       the section `train.lora`
adapter.py    the adapter of a policy
rules.py      its rule of `engine validate`
"""

from engine.plugin import Plugin, Section

PLUGIN = Plugin(
    name="lora",
    about="Trains a LoRA adapter instead of all weights",
    sections=(Section(owner="train", keys=("lora",), use="engine.plugins.lora.spec:LoraSpec"),),
    rules=("engine.plugins.lora.rules",),
    hooks={"spec_facts": "engine.plugins.lora.spec:facts"},
)
