"""What holds for the source of tasks `harbor`, and for the adapter that runs them."""

from engine.schemas.entry import AdapterFacts
from engine.schemas.tasks import SourceFacts

SOURCE = SourceFacts(keys=("path", "unsupported"), opens="engine.plugins.harbor.source:task_rows")
ADAPTER = AdapterFacts(
    name="harbor",
    runs="engine.plugins.harbor.environment:HarborEnvironment",
    use="`shell` (the model has a tool of that name) or `program` (for an agent program); with "
    "`tasks: {source: harbor}`",
    names="name",
    rewards="end",
    thread_safe=True,
    tools="some",
)
