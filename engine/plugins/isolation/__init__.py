"""`isolation: process`: code of a spec in worker processes with limits."""

from engine.plugin import Plugin

PLUGIN = Plugin(
    name="isolation",
    about="Code of a spec in worker processes with limits",
    isolation_modes={"process": "engine.plugins.isolation.pool:Isolation"},
)
