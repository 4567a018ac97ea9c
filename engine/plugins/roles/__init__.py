"""Users and judges that a model plays.

players.py   what the core knows of a role, and which weights it has while the policy is trained
models.py    the simulated user, and the models of roles: a service, which opens their backends
judge.py     a source of final rewards
rules.py     the rules `role.*`
"""

from engine.plugin import Plugin

PLUGIN = Plugin(
    name="roles",
    about="Simulated users and judges that a model plays",
    players={"user": "engine.plugins.roles.players:user", "scorer": "engine.plugins.roles.players:scorer"},
    rules=("engine.plugins.roles.rules",),
    hooks={
        "open_service": "engine.plugins.roles.models:open_service",
        "reward_source": "engine.plugins.roles.judge:judge",
    },
)
