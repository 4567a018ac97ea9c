"""vLLM servers over `/v1/completions`, with token ids in both directions.

spec.py    the section `backend`
client.py  the backend, its dialect; which log-probs a server reports
"""

from engine.plugin import Plugin

PLUGIN = Plugin(
    name="vllm",
    about="vLLM servers as the backend of a policy",
    needs=("servers",),
    backends={"vllm": "engine.plugins.vllm.spec:VLLMBackendSpec"},
)
