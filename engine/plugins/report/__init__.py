"""The metrics of a training in trackers, in addition to its own file `metrics.jsonl`.

spec.py       the section `train.report_to`, `train.tracking`
trackers.py   sends the metrics of a training, each step once, to TensorBoard, trackio, Weights & Biases, MLflow
rules.py      its rules of `engine validate`
"""

from engine.plugin import Plugin, Section

PLUGIN = Plugin(
    name="report",
    about="Sends the metrics of a training to trackers",
    sections=(
        Section(
            owner="train",
            keys=("report_to", "tracking"),
            use="engine.plugins.report.spec:ReportSpec",
            inline=True,
            resumable=("report_to", "tracking"),
        ),
    ),
    trackers={
        "tensorboard": "engine.plugins.report.trackers:TensorBoard",
        "trackio": "engine.plugins.report.trackers:Trackio",
        "wandb": "engine.plugins.report.trackers:Wandb",
        "mlflow": "engine.plugins.report.trackers:Mlflow",
    },
    rules=("engine.plugins.report.rules",),
    hooks={"observe_training": "engine.plugins.report.trackers:observe"},
)
