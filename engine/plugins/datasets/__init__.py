"""Data sets made of a run: `engine export --format sft|trl|verl`."""

from engine.plugin import Plugin

PLUGIN = Plugin(
    name="datasets",
    about="Rows for supervised fine-tuning, data sets of messages for TRL and verl, also on the Hugging Face hub",
    export_formats={
        "sft": "engine.plugins.datasets.formats:SFT",
        "trl": "engine.plugins.datasets.formats:TRL",
        "verl": "engine.plugins.datasets.formats:VERL",
    },
    options={
        "export --turns": "engine.plugins.datasets.command:TURNS",
        "export --content": "engine.plugins.datasets.command:CONTENT",
        "export --images": "engine.plugins.datasets.command:IMAGES",
        "export --ground-truth": "engine.plugins.datasets.command:GROUND_TRUTH",
        "export --push": "engine.plugins.datasets.command:PUSH",
        "export --public": "engine.plugins.datasets.command:PUBLIC",
    },
)
