"""What each plugin of the engine adds, for messages about one that is not installed. Written by scripts/known_plugins.py."""

KNOWN: dict[str, dict[str, tuple[str, ...]]] = {
    "doctor": {"install": ("pip install --force-reinstall --no-deps episode-engine",), "commands": ("doctor",)},
    "scenarios": {
        "install": ("pip install --force-reinstall --no-deps episode-engine",),
        "commands": ("test",),
        "schemas": ("scenarios",),
    },
    "view": {"install": ("pip install --force-reinstall --no-deps episode-engine",), "commands": ("view",)},
}
