"""Models behind chat APIs, and what they cost.

spec.py      the backends `openai` and `anthropic`, their prices, and the section `rollout.max_cost`
backend.py   the base class of their backends, and requests and tokens in a minute; openai.py, anthropic.py: one
             protocol each
budget.py    what a run has cost, in a file
costs.py     counts the costs of a run or a training
rules.py     the rule `backend.no-prices`
"""

from engine.plugin import Plugin, Section

PLUGIN = Plugin(
    name="chat_apis",
    about="Backends `openai` and `anthropic`, and limits on their cost",
    needs=("servers",),
    sections=(
        Section(
            owner="rollout",
            keys=("max_cost",),
            use="engine.plugins.chat_apis.spec:CostSpec",
            inline=True,
            resumable=("max_cost",),
        ),
    ),
    backends={
        "openai": "engine.plugins.chat_apis.spec:OpenAIBackendSpec",
        "anthropic": "engine.plugins.chat_apis.spec:AnthropicBackendSpec",
    },
    old_options={"run --max-cost": "engine run SPEC --set rollout.max_cost=N"},
    rules=("engine.plugins.chat_apis.rules",),
    hooks={
        "open_service": "engine.plugins.chat_apis.costs:open_service",
        "spec_facts": "engine.plugins.chat_apis.spec:facts",
    },
)
