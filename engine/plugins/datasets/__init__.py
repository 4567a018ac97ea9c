"""Data sets for other trainers, made of a run: `engine export --format trl|verl`."""

from engine.plugin import Plugin

PLUGIN = Plugin(
    name="datasets",
    about="Data sets of messages for TRL and verl, also on the Hugging Face hub",
    export_formats={"trl": "engine.plugins.datasets.command:TRL", "verl": "engine.plugins.datasets.command:VERL"},
    options={
        "export --content": "engine.plugins.datasets.command:CONTENT",
        "export --images": "engine.plugins.datasets.command:IMAGES",
        "export --ground-truth": "engine.plugins.datasets.command:GROUND_TRUTH",
        "export --push": "engine.plugins.datasets.command:PUSH",
        "export --public": "engine.plugins.datasets.command:PUBLIC",
    },
)
