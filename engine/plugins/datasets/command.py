"""Options of `engine export` for data sets. The command line reads them when it starts, so this imports little."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

CONTENT = Annotated[
    Literal["turns", "conversations", "preferences", "prompts"] | None,
    typer.Option(
        help="With --format trl or verl, what a row is. trl: turns (the default), conversations, preferences, prompts. "
        "verl: prompts."
    ),
]
IMAGES = Annotated[
    Literal["bytes", "paths"] | None,
    typer.Option(
        help="With --format trl or verl: images as the bytes of their files (the default), or as paths of files beside "
        "the data set."
    ),
]
GROUND_TRUTH = Annotated[
    str | None,
    typer.Option(metavar="FIELD", help="With --content prompts: the task's field with its answer, also dotted."),
]
PUSH = Annotated[
    str | None,
    typer.Option(
        metavar="ID",
        help="Push the rows to a data set of the Hugging Face hub, `owner/name`, with the token in HF_TOKEN; a new one "
        "is private.",
    ),
]
PUBLIC = Annotated[bool | None, typer.Option("--public", help="With --push: a new data set is public.")]
TURNS = Annotated[
    str | None,
    typer.Option(
        metavar="CEL",
        help="With --format sft or trl: train only turns for which this holds, also over `turn`, such as 'turn.event "
        '!= "malformed"\'.',
    ),
]
