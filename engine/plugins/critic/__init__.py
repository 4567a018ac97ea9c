"""The critic: values of states, which credit methods with `needs_values` read.

spec.py    the kinds of `train.critic`, and the credit methods that read its values
gae.py     the formulas of these methods
critic.py  the critic, its loss and its optimizer: an auxiliary objective of the learner
rules.py   its rules of `engine validate`
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
        "bilevel_gae": "engine.plugins.critic.spec:BilevelGaeCredit",
        "turn_ppo": "engine.plugins.critic.spec:TurnPpoCredit",
        "gae": "engine.plugins.critic.spec:GaeCredit",
    },
    rules=("engine.plugins.critic.rules",),
    hooks={"auxiliary_objective": "engine.plugins.critic.critic:objective_of"},
)
