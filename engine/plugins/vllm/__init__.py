"""vLLM servers over `/v1/completions`, with token ids in both directions.

spec.py    the section `backend`
client.py  the backend
wire.py    the bodies of a request and of its reply, checked to the token
checks.py  checks of the servers before the first episode, among them which log-probs they report
"""

from engine.plugin import Plugin

PLUGIN = Plugin(
    name="vllm",
    about="vLLM servers as the backend of a policy",
    backends={"vllm": "engine.plugins.vllm.spec:VLLMBackendSpec"},
)
