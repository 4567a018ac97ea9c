"""What each plugin of the engine adds, for messages about one that is not installed.

Written by scripts/known_plugins.py.
"""

KNOWN: dict[str, dict[str, tuple[str, ...]]] = {
    "adapters": {
        "install": ("pip install --force-reinstall --no-deps episode-engine",),
        "commands": ("envs", "import verl"),
        "adapters": ("slime", "skyrl_gym", "gymnasium", "verifiers", "reasoning_gym", "verl"),
        "tool_adapters": ("mcp",),
        "row_presets": ("verl", "slime"),
    },
    "agents": {
        "install": ("pip install --force-reinstall --no-deps episode-engine",),
        "sections": ("agent",),
        "actions": ("run_agent",),
        "presets": ("agent",),
        "records": ("agent",),
    },
    "audit": {"install": ("pip install --force-reinstall --no-deps episode-engine",), "commands": ("audit",)},
    "chat_apis": {
        "install": ("pip install --force-reinstall --no-deps episode-engine",),
        "sections": ("rollout.max_cost",),
        "backends": ("openai", "anthropic"),
        "old_options": ("run --max-cost",),
    },
    "code_scanning": {
        "install": ("pip install --force-reinstall --no-deps episode-engine",),
        "findings_formats": ("sarif", "github"),
    },
    "compare": {
        "install": ("pip install --force-reinstall --no-deps episode-engine",),
        "commands": ("compare",),
        "old_options": ("compare --format",),
    },
    "condense": {
        "install": ("pip install --force-reinstall --no-deps episode-engine",),
        "sections": ("condense", "limits.on_overflow", "limits.condensations"),
        "actions": ("condense", "ask_summary"),
        "limits": ("condensations",),
        "records": ("condense",),
    },
    "confinement": {"install": ("pip install --force-reinstall --no-deps episode-engine",)},
    "credit_methods": {
        "install": ("pip install --force-reinstall --no-deps episode-engine",),
        "credits": ("turn_discount", "mt_grpo", "score", "progress", "redistribute"),
    },
    "critic": {
        "install": ("pip install --force-reinstall --no-deps episode-engine",),
        "credits": ("bilevel_gae", "turn_ppo", "gae"),
        "critics": ("probe", "head", "network"),
    },
    "datasets": {
        "install": ("pip install --force-reinstall --no-deps episode-engine",),
        "options": (
            "export --turns",
            "export --content",
            "export --images",
            "export --ground-truth",
            "export --push",
            "export --public",
        ),
        "export_formats": ("sft", "trl", "verl"),
    },
    "difficulty": {
        "install": ("pip install --force-reinstall --no-deps episode-engine",),
        "sections": ("train.difficulty",),
    },
    "doctor": {
        "install": ("pip install --force-reinstall --no-deps episode-engine",),
        "commands": ("doctor", "models"),
    },
    "drivers": {
        "install": ("pip install --force-reinstall --no-deps episode-engine",),
        "sections": ("rollout.drivers", "rollout.shards"),
        "old_options": ("run --drivers",),
    },
    "evaluation": {
        "install": ("pip install --force-reinstall --no-deps episode-engine",),
        "sections": ("train.eval",),
        "commands": ("eval",),
        "old_options": ("eval --format",),
    },
    "harbor": {
        "install": ("pip install --force-reinstall --no-deps episode-engine",),
        "adapters": ("harbor",),
        "sources": ("harbor",),
    },
    "isolation": {
        "install": ("pip install --force-reinstall --no-deps episode-engine",),
        "isolation_modes": ("process",),
    },
    "launch": {"install": ("pip install --force-reinstall --no-deps episode-engine",), "launchers": ("sglang", "vllm")},
    "learning_signal": {"install": ("pip install --force-reinstall --no-deps episode-engine",)},
    "local": {
        "install": ("pip install --force-reinstall --no-deps episode-engine",),
        "backends": ("local",),
        "models": ("tiny-qwen2_5-vl", "tiny-qwen2"),
        "weight_syncs": ("local",),
    },
    "lora": {"install": ("pip install --force-reinstall --no-deps episode-engine",), "sections": ("train.lora",)},
    "notices": {"install": ("pip install --force-reinstall --no-deps episode-engine",), "sections": ("notify",)},
    "pictures": {
        "install": ("pip install --force-reinstall --no-deps episode-engine",),
        "commands": ("graph",),
        "graph_formats": ("svg",),
    },
    "plan": {
        "install": ("pip install --force-reinstall --no-deps episode-engine",),
        "sections": ("train.plan",),
        "commands": ("plan",),
        "old_options": ("train --plan", "train --processes", "train --memory", "train --images", "train --image-size"),
    },
    "plots": {"install": ("pip install --force-reinstall --no-deps episode-engine",)},
    "preparing": {
        "install": ("pip install --force-reinstall --no-deps episode-engine",),
        "overlong": ("drop", "error"),
    },
    "replay": {
        "install": ("pip install --force-reinstall --no-deps episode-engine",),
        "commands": ("replay", "rescore"),
    },
    "report": {
        "install": ("pip install --force-reinstall --no-deps episode-engine",),
        "sections": ("train.report_to", "train.tracking"),
        "trackers": ("tensorboard", "trackio", "wandb", "mlflow"),
    },
    "retention": {
        "install": ("pip install --force-reinstall --no-deps episode-engine",),
        "sections": ("rollout.keep",),
        "commands": ("compact",),
    },
    "reviews": {"install": ("pip install --force-reinstall --no-deps episode-engine",), "commands": ("rate",)},
    "roles": {"install": ("pip install --force-reinstall --no-deps episode-engine",), "players": ("user", "scorer")},
    "scaffold": {"install": ("pip install --force-reinstall --no-deps episode-engine",), "commands": ("new",)},
    "scenarios": {
        "install": ("pip install --force-reinstall --no-deps episode-engine",),
        "commands": ("test",),
        "schemas": ("scenarios",),
        "old_options": ("test --format",),
    },
    "schema": {"install": ("pip install --force-reinstall --no-deps episode-engine",), "commands": ("schema",)},
    "serve": {"install": ("pip install --force-reinstall --no-deps episode-engine",), "commands": ("serve",)},
    "servers": {"install": ("pip install --force-reinstall --no-deps episode-engine",)},
    "sft": {
        "install": ("pip install --force-reinstall --no-deps episode-engine",),
        "sections": ("train.data",),
        "train_kinds": ("sft",),
    },
    "sglang": {"install": ("pip install --force-reinstall --no-deps episode-engine",), "backends": ("sglang",)},
    "show": {"install": ("pip install --force-reinstall --no-deps episode-engine",), "commands": ("show",)},
    "templates": {"install": ("pip install --force-reinstall --no-deps episode-engine",), "commands": ("template",)},
    "traces": {"install": ("pip install --force-reinstall --no-deps episode-engine",), "sections": ("traces",)},
    "trainers": {
        "install": ("pip install --force-reinstall --no-deps episode-engine",),
        "trainers": ("trl", "verl", "verl_agent_loop", "slime", "skyrl", "areal", "prime_rl", "rllm", "tinker", "art"),
    },
    "view": {"install": ("pip install --force-reinstall --no-deps episode-engine",), "commands": ("view",)},
    "vllm": {"install": ("pip install --force-reinstall --no-deps episode-engine",), "backends": ("vllm",)},
    "weights": {"install": ("pip install --force-reinstall --no-deps episode-engine",), "weight_syncs": ("sglang",)},
}
