"""Whether a machine can run what a spec asks for: `engine doctor`; which models it has: `engine models`."""

from engine.plugin import Plugin

PLUGIN = Plugin(
    name="doctor",
    about="Checks torch, CUDA, SGLang, ports, shared memory and disk before a run",
    commands={
        "doctor": "engine.plugins.doctor.command:doctor",
        "models": "engine.plugins.doctor.command:models",
    },
)
