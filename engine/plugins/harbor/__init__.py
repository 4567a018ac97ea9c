"""Task folders of Harbor's form: their source of tasks, and the environment that runs them.

source.py        task folders as rows, and what holds for the source and the adapter `harbor`
folders.py       what is read of a folder; dockerfile.py: of its Dockerfile
environment.py   an episode in the sandbox, with its files and commands
rules.py         its rule of `engine validate`
"""

from engine.plugin import Plugin

PLUGIN = Plugin(
    name="harbor",
    about="Task folders of Harbor's form, in the sandbox",
    needs=("confinement",),
    sources={"harbor": "engine.plugins.harbor.source:SOURCE"},
    adapters={"harbor": "engine.plugins.harbor.source:ADAPTER"},
    rules=("engine.plugins.harbor.rules",),
)
