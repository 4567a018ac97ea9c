"""Credit methods beyond returns compared with a group: discounting by attempts, shaping, redistribution.

spec.py             the methods of `rewards.credit`
formulas.py         what each computes
"""

from engine.plugin import Plugin

PLUGIN = Plugin(
    name="credit_methods",
    about="Credit methods of papers: MT-GRPO, SCoRe, progress of a score, RUDDER-like redistribution, discounting by "
    "turns",
    credits={
        "turn_discount": "engine.plugins.credit_methods.spec:TurnDiscountCredit",
        "mt_grpo": "engine.plugins.credit_methods.spec:MtGrpoCredit",
        "score": "engine.plugins.credit_methods.spec:ScoreCredit",
        "progress": "engine.plugins.credit_methods.spec:ProgressCredit",
        "redistribute": "engine.plugins.credit_methods.spec:RedistributeCredit",
    },
)
