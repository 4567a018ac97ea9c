"""Results of many rows that are made before a run, in several processes, and kept on disk: `tasks.overlong`.

overlong.py         leaves tasks out, or refuses them, whose prompt leaves no room for a turn
jobs.py             `prepare`: jobs in order, from the results on disk, in this process or in several

The results do not depend on the number of processes, nor on what the cache holds. A job that fails in a worker is done
again in this process, so errors are those of one process.
"""

from engine.plugin import Plugin

PLUGIN = Plugin(
    name="preparing",
    about="Counts the tokens of all prompts before a run, and leaves out tasks that do not fit",
    overlong={
        "drop": "engine.plugins.preparing.overlong:without_overlong",
        "error": "engine.plugins.preparing.overlong:refuse_overlong",
    },
)
