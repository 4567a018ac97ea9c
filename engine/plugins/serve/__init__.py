"""Episodes over HTTP, for programs in other processes.

http.py         the base of services: routes, token, `/health`, on the port of the model endpoint
groups.py       requests for groups of a trainer; group_runs.py runs them, request_log.py keeps them, wire.py writes
                the answer
episodes.py     episodes of programs that run elsewhere: opening and ending them
command.py      the command `engine serve`; serving.py: one run that is served until a signal
"""

from engine.plugin import Plugin

PLUGIN = Plugin(
    name="serve",
    needs=("agents",),
    about="Episodes over HTTP: groups for trainers, and episodes of programs that run elsewhere",
    commands={"serve": "engine.plugins.serve.command:serve"},
)
