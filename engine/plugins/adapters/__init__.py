"""Environments and tools of other libraries, run unchanged: one file for each library, which is imported when an
episode begins.

facts.py     what holds for each, for `environment.adapter` and the `adapter` of tools
base.py      what the adapters share
row_presets.py  rows of the data files of verl and slime, for `tasks.preset`
verl/        interactions and tools of verl, and `engine import verl` (config.py)
offered.py   what a spec may name, for `engine envs` (command.py)
rules.py     its rules of `engine validate`
"""

from engine.plugin import Plugin

FACTS = "engine.plugins.adapters.facts"
PLUGIN = Plugin(
    name="adapters",
    about="Environments, tools and data files of other libraries: slime, SKyRL-gym, Gymnasium, verifiers, "
    "reasoning-gym, verl and MCP",
    adapters={
        "slime": f"{FACTS}:SLIME",
        "skyrl_gym": f"{FACTS}:SKYRL_GYM",
        "gymnasium": f"{FACTS}:GYMNASIUM",
        "verifiers": f"{FACTS}:VERIFIERS",
        "reasoning_gym": f"{FACTS}:REASONING_GYM",
        "verl": f"{FACTS}:VERL",
    },
    tool_adapters={"mcp": f"{FACTS}:MCP"},
    row_presets={
        "verl": "engine.plugins.adapters.row_presets:VerlRows",
        "slime": "engine.plugins.adapters.row_presets:SlimeRows",
    },
    commands={
        "envs": "engine.plugins.adapters.command:envs",
        "import verl": "engine.plugins.adapters.verl.config:verl",
    },
    rules=("engine.plugins.adapters.rules",),
)
