"""Servers that a run starts itself (`backend.launch`): commands, processes, health, logs, restarts.

servers.py            starts, watches and ends servers; warden.py: the process between the engine and a server
commands.py           the commands of servers
"""

from engine.plugin import Plugin

PLUGIN = Plugin(
    name="launch",
    about="Starts SGLang and vLLM servers for a run",
    needs=("servers",),
    launchers={
        "sglang": "engine.plugins.launch.commands:launch_sglang",
        "vllm": "engine.plugins.launch.commands:launch_vllm",
    },
)
