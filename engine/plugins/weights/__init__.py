"""How servers get the weights of a training.

sync_sglang.py      the ways to send weights to SGLang servers: `disk`, `tensors`, `adapter`;
                    sync_collective.py: `collective`
server_pushes.py    what these have in common, and whether a server has the model that is trained
shared_tensors.py   weights in the memory of one host
colocation.py       `train.colocate`: SGLang servers release their GPU memory during an update, and take it back
rules.py            its rules of `engine validate`
"""

from engine.plugin import Plugin

PLUGIN = Plugin(
    name="weights",
    about="Sends the weights of a training to servers",
    needs=("servers", "sglang"),
    weight_syncs={"sglang": "engine.plugins.weights.sync_sglang:open_sglang_sync"},
    rules=("engine.plugins.weights.rules",),
    hooks={"lend_memory": "engine.plugins.weights.colocation:lend_memory"},
)
