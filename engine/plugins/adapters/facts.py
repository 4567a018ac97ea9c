"""What holds for each adapter that ships."""

from engine.schemas.entry import AdapterFacts, ToolAdapterFacts

SLIME = AdapterFacts(
    name="slime",
    runs="engine.plugins.adapters.slime:SlimeEnvironment",
    use="an `env_*.py` file of slime's form and its function: `path/env.py:build_env`",
    names="code",
    loads="engine.plugins.adapters.slime:load",
    rewards="turn",
    images=True,
    reads_written=True,
)
SKYRL_GYM = AdapterFacts(
    name="skyrl_gym",
    runs="engine.plugins.adapters.skyrl_gym:SkyRLEnvironment",
    use="an id that is registered with SkyRL-gym, or a class: `package.module:Name`, `path/file.py:Name`",
    names="name or code",
    rewards="turn",
    packages=("skyrl_gym",),
    loads="engine.plugins.adapters.skyrl_gym:load",
    install="pip install 'episode-engine[skyrl-gym]'",
    reads_written=True,
)
GYMNASIUM = AdapterFacts(
    name="gymnasium",
    runs="engine.plugins.adapters.gymnasium:GymnasiumEnvironment",
    use="an id that is registered with Gymnasium: `FrozenLake-v1`, or `module:Id` to import the module first",
    names="name",
    rewards="turn",
    packages=("gymnasium",),
    loads="engine.plugins.adapters.gymnasium:load",
    install="pip install 'episode-engine[gymnasium]'",
    images=True,
    truncates=True,
)
VERIFIERS = AdapterFacts(
    name="verifiers",
    runs="engine.plugins.adapters.verifiers:VerifiersEnvironment",
    use="the function that returns the environment: `package.module:load_environment`, `path/file.py:load_environment`",
    names="code",
    rewards="turn and end",
    packages=("verifiers",),
    loads="engine.plugins.adapters.verifiers:load",
    install="pip install 'episode-engine[verifiers]'",
    images=True,
    truncates=True,
    tools="some",
)
REASONING_GYM = AdapterFacts(
    name="reasoning_gym",
    runs="engine.plugins.adapters.reasoning_gym:ReasoningGymEnvironment",
    use="the name of a data set of reasoning-gym; `rows`: each row names its own",
    names="name",
    rewards="turn",
    packages=("reasoning_gym",),
    loads="engine.plugins.adapters.reasoning_gym:load",
    install="pip install 'episode-engine[reasoning-gym]'",
    effects="pure",
)
VERL = AdapterFacts(
    name="verl",
    runs="engine.plugins.adapters.verl.tools:VerlTools",
    use="verl's tool YAML (`tool_config_path`); verl need not be installed",
    names="file",
    loads="engine.plugins.adapters.verl.tools:load",
    rewards="turn and end",
    images=True,
    tools="all",
)
MCP = ToolAdapterFacts(
    name="mcp",
    runs="engine.plugins.adapters.mcp:McpServer",
    use="the command line of an MCP server, or its http address",
    packages=("mcp",),
    install="pip install 'episode-engine[mcp]'",
)
