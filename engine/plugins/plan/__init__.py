"""The memory of a training, by kind, before anything is loaded.

spec.py             the section `train.plan`
command.py          `engine plan`
plan.py             the plan, and whether the longest row of a spec fits, for `engine validate`
planned_step.py     a step with tensors without content, and its row with images
"""

from engine.plugin import Plugin, Section

PLUGIN = Plugin(
    name="plan",
    about="Plans the memory of a training before anything is loaded",
    sections=(Section(owner="train", keys=("plan",), use="engine.plugins.plan.spec:PlanSpec", resumable=("plan",)),),
    commands={"plan": "engine.plugins.plan.command:plan"},
    old_options={
        "train --plan": "engine plan SPEC",
        "train --processes": "engine plan SPEC --processes N",
        "train --memory": "engine plan SPEC --memory SIZE",
        "train --images": "engine plan SPEC --images N",
        "train --image-size": "engine plan SPEC --image-size WxH",
    },
    rules=("engine.plugins.plan.spec",),  # it has none: `row_findings` finds `train.plan`, whose page is in `pages`
    hooks={"slow_findings": "engine.plugins.plan.plan:row_findings"},
)
