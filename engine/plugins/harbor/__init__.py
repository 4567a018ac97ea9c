"""Task folders of Harbor's form: their source of tasks, and the environment that runs them.

facts.py         the source `harbor`, and what holds for the adapter `harbor`
source.py        task folders as rows; folders.py and dockerfile.py: what is read of a folder
environment.py   an episode in the sandbox, with its files and commands
rules.py         its rule of `engine validate`
"""

from engine.plugin import Plugin

PLUGIN = Plugin(
    name="harbor",
    about="Task folders of Harbor's form, in the sandbox",
    needs=("confinement",),
    sources={"harbor": "engine.plugins.harbor.facts:SOURCE"},
    adapters={"harbor": "engine.plugins.harbor.facts:ADAPTER"},
    rules=("engine.plugins.harbor.rules",),
)
