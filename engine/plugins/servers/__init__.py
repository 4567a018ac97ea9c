"""What backends share whose servers take token ids and report token ids: SGLang and vLLM.

dialect.py     how the servers of one kind write requests and replies, as data
backend.py     one reply: tries, deadlines, interruptions, aborts
reply_call.py  the request of a reply: sent when a slot is free, read where its reply arrives
wire.py        the text of prompts, kept from turn to turn; a reply as ids and log-probs, joined where
               it was interrupted
pool.py        the servers, and which one a request goes to
sessions.py    the prompts that servers keep
checks.py      what a backend checks of its servers before the first episode
launched.py    servers that a run starts: what starts them is found by the point `launchers`
rules.py       the rule `backend.no-launcher`
http/          HTTP/1.1 for backends with servers
"""

from engine.plugin import Plugin

PLUGIN = Plugin(
    name="servers",
    about="What the backends `sglang`, `vllm`, `openai` and `anthropic` share: servers, their pool, HTTP",
    rules=("engine.plugins.servers.rules",),
)
