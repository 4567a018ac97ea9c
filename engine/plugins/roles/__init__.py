"""Users and judges that a model plays.

models.py      the models of roles: a service, which opens their backends
weights.py     which weights a role has while the policy is trained
model_user.py  the simulated user; judge.py: a source of final rewards
players.py     what the core knows of a role
rules.py       the rules `role.*`
"""

from engine.plugin import Plugin

PLUGIN = Plugin(
    name="roles",
    about="Simulated users and judges that a model plays",
    players={"user": "engine.plugins.roles.players:user", "scorer": "engine.plugins.roles.players:scorer"},
    rules=("engine.plugins.roles.rules",),
    hooks={
        "open_service": "engine.plugins.roles.players:open_service",
        "reward_source": "engine.plugins.roles.players:judge",
    },
)
