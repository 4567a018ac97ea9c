"""SGLang servers over their native HTTP API.

spec.py           the section `backend`
client.py         the backend, with its checks of servers
wire.py           its dialect; requests with images
control.py        weights, adapters and pauses
checks.py         test requests; what a router drops
sample_prompt.py  a prompt whose ids, pixels and log-probs are compared with those of the model's files
"""

from engine.plugin import Plugin

PLUGIN = Plugin(
    name="sglang",
    about="SGLang servers as the backend of a policy",
    needs=("servers",),
    backends={"sglang": "engine.plugins.sglang.spec:SGLangBackendSpec"},
)
