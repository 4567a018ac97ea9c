"""Task folders of Harbor's form: their source of tasks, and the environment that runs them."""

from engine.plugin import Plugin

PLUGIN = Plugin(name="harbor", about="Task folders of Harbor's form, in the sandbox")
