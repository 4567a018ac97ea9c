"""Other trainers: what a spec uses and what each carries of it (`capabilities.py`), and what all adapters share: groups
of episodes (`rollouts.py`), rows and sums of the hand-over (`handover.py`), a loop in a thread (`process.py`), checks
of a trainer's classes and settings (`library.py`)."""

from engine.plugin import Plugin

PLUGIN = Plugin(
    name="trainers",
    about="Other trainers: TRL, verl, slime, SkyRL and AReaL train on the engine's episodes",
    needs=("local", "servers", "sglang"),
    trainers={
        "trl": "engine.plugins.trainers.capabilities:TRL",
        "verl": "engine.plugins.trainers.capabilities:VERL",
        "verl_agent_loop": "engine.plugins.trainers.capabilities:VERL_AGENT_LOOP",
        "slime": "engine.plugins.trainers.capabilities:SLIME",
        "skyrl": "engine.plugins.trainers.capabilities:SKYRL",
        "areal": "engine.plugins.trainers.capabilities:AREAL",
        "prime_rl": "engine.plugins.trainers.capabilities:PRIME_RL",
        "rllm": "engine.plugins.trainers.capabilities:RLLM",
        "tinker": "engine.plugins.trainers.capabilities:TINKER",
        "art": "engine.plugins.trainers.capabilities:ART",
    },
    rules=("engine.plugins.trainers.capabilities",),
)
