"""One run in several processes on Ray: leases of groups, what a driver does, and shards.

spec.py           the section `rollout.drivers`, `rollout.shards`
hooks.py          what the engine asks
processes.py      the drivers of one spec: what they refuse, a run on them with its panel and its result
leases.py         which driver runs which group, in a file; actors.py, cluster.py: Ray
session.py, feed.py   what a driver of a run does
run.py            a run with several drivers, from the cluster to the summary
driver_runner.py  the episodes of a training or a service on drivers
shards.py, publisher.py, places.py   finished groups as files in a folder or an object store
sharded.py, catalogue.py   reads stores and shards as one run
rules.py          the rules `rollout.drivers` and `rollout.shards`
"""

from engine.plugin import Plugin, Section

PLUGIN = Plugin(
    name="drivers",
    about="One run in several processes on Ray, and shards",
    sections=(
        Section(
            owner="rollout",
            keys=("drivers", "shards"),
            use="engine.plugins.drivers.spec:DriversSpec",
            inline=True,
            resumable=("drivers",),
        ),
    ),
    old_options={"run --drivers": "engine run SPEC --set rollout.drivers=N"},
    rules=("engine.plugins.drivers.rules",),
    hooks={
        "drive": "engine.plugins.drivers.hooks:drive",
        "find_run": "engine.plugins.drivers.hooks:find_run",
        "open_run": "engine.plugins.drivers.hooks:open_run",
    },
)
