"""The critic: values of states, which credit methods with `needs_values` read.

spec.py             the kinds of `train.critic`
credits.py, gae.py  the credit methods that read its values: their keys, and their formulas
critic.py           the critic and its optimizer, an auxiliary objective of the learner
value_loss.py       its loss
opening.py          makes the critic of a training
rules.py            its rules of `engine validate`
"""

from engine.plugin import Plugin

PLUGIN = Plugin(
    name="critic",
    about="Critics of training: values of states, and the credit methods that need them",
    critics={
        "probe": "engine.plugins.critic.spec:ProbeCritic",
        "head": "engine.plugins.critic.spec:HeadCritic",
        "network": "engine.plugins.critic.spec:NetworkCritic",
    },
    credits={
        "bilevel_gae": "engine.plugins.critic.credits:BilevelGaeCredit",
        "turn_ppo": "engine.plugins.critic.credits:TurnPpoCredit",
        "gae": "engine.plugins.critic.credits:GaeCredit",
    },
    rules=("engine.plugins.critic.rules",),
    hooks={"auxiliary_objective": "engine.plugins.critic.opening:objective_of"},
)
