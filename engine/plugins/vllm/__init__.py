"""vLLM servers over `/v1/completions`, with token ids in both directions.

spec.py    the section `backend`
client.py  the backend; which log-probs a server reports
wire.py    its dialect
"""

from engine.plugin import Plugin

PLUGIN = Plugin(
    name="vllm",
    about="vLLM servers as the backend of a policy",
    needs=("servers",),
    backends={"vllm": "engine.plugins.vllm.spec:VLLMBackendSpec"},
)
