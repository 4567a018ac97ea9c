"""What backends share whose servers take token ids and report token ids: SGLang and vLLM.

rules.py  the rule `backend.no-launcher`
"""

from engine.plugin import Plugin

PLUGIN = Plugin(
    name="servers",
    about="What the backends `sglang`, `vllm`, `openai` and `anthropic` share: servers, their pool, HTTP",
    rules=("engine.plugins.servers.rules",),
)
