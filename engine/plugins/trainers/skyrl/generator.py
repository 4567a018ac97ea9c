"""Runs the episodes of SkyRL's batches: its `GeneratorInterface`."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from engine.backends.sglang.routing import layout_of
from engine.errors import TrainError
from engine.plugins.trainers.handover import HandedRow, SeveralRows, Sums, groups_of, one_row_each
from engine.plugins.trainers.library import check_overrides, imports_of
from engine.plugins.trainers.skyrl.handover import filled, generator_output, sums_of_batch
from engine.plugins.trainers.skyrl.sampler import SkyRLBackend

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engine.plugins.trainers.rollouts import TrainerRollouts

CHANGES = "an overridden method of the trainer, or a setting that masks, cuts or drops responses"


class EngineEpisodes:
    """The methods of the generator. `generator_class` adds SkyRL's base class.

    Args:
        episodes: The episodes of the spec.
        client: SkyRL's inference engine client.
        model: The name by which SkyRL's servers know the policy; None: the client's own.
        several_rows: What happens to an episode with several rows, since SkyRL takes one for each prompt.
    """

    def __init__(
        self,
        episodes: TrainerRollouts,
        client: Any,
        *,
        model: str | None = None,
        several_rows: SeveralRows = "refuse",
    ) -> None:
        self._episodes = episodes
        self._several = several_rows
        self._started = False
        declared = episodes.spec.backend
        self.backend = SkyRLBackend(client, type(declared), context=episodes.context, model=model)
        """What samples."""
        self.backend.pixels = episodes.pixels
        self.backend.layout = layout_of(episodes.model_folder) if declared.asks_experts else None
        self.handed: list[HandedRow] = []
        """The rows of the newest batch, one for each prompt."""
        self.metrics: dict[str, float] = {}
        """Metrics of the newest batch, under the names of `engine train`, and `skyrl/left_out_tokens` and `skyrl/empty_rows`."""

    async def generate(self, input_batch: Mapping[str, Any]) -> dict[str, Any]:
        """Run the episodes of a batch. SkyRL calls this; all calls are made on one loop.

        Args:
            input_batch: SkyRL's `GeneratorInput`. `env_extras` has the task's id under `task`; each prompt is repeated
                `rollout.samples_per_task` times.

        Raises:
            TrainError: kind `train_setup`: the batch is an evaluation's, or its prompts are not groups of the spec's tasks; kind
                `handover`: an episode has several rows, or as `filled`; kind `no_data`: no episode can be trained on.
            EngineError: as `TrainerRollouts.batch`.
        """
        told = input_batch.get("batch_metadata")
        if told is None or told.training_phase != "train":
            raise TrainError("this generator runs no evaluation; evaluate with `engine eval`", kind="train_setup")
        extras = input_batch.get("env_extras") or [{}] * len(input_batch["prompts"])
        tasks = [(each or {}).get("task") for each in extras]
        if None in tasks:
            raise TrainError(
                "a prompt has no task: rows of the data set need the column `task` with the id of a task (EnginePPOExp makes such a data set)",
                kind="train_setup",
            )
        samples = self._episodes.spec.rollout.samples_per_task
        groups = groups_of([str(each) for each in tasks], samples, f"set `generator.n_samples_per_prompt` to {samples}")
        self.backend.version = max(0, told.global_step - 1)  # SkyRL's first step is 1
        if not self._started:
            await self._episodes.start(self.backend)
            self._started = True
        batch = await self._episodes.batch(groups, samples, self.backend.version)
        placed = one_row_each(
            self._episodes.final_rows(batch),
            len(groups),
            samples,
            trainer="SkyRL",
            several=self._several,
            leave_out='EnginePPOExp(…, several_rows="leave_out")',
        )
        self.handed = filled(placed.rows)
        self.metrics = batch.metrics(tuple(self._episodes.spec.tasks.mix or ())) | {
            "skyrl/left_out_tokens": float(placed.left_out),
            "skyrl/empty_rows": float(placed.empty),
        }
        told_metrics = {f"engine/{name}": value for name, value in self.metrics.items()}
        return generator_output(self.handed, told_metrics, self._episodes.pixels)

    def check(self, batch: Any) -> None:
        """Compare the sums of SkyRL's training batch, with advantages, with those of the newest rows.

        Raises:
            TrainError: kind `handover`: they differ.
        """
        Sums.of_rows(self.handed, self._episodes.pixels).check(sums_of_batch(batch), "SkyRL", CHANGES)

    async def close(self) -> None:
        """Close the run store and the services of the episodes. Later calls do nothing."""
        await self._episodes.close()


@cache
def generator_class() -> type[Any]:
    """SkyRL's GeneratorInterface with the methods of `EngineEpisodes`.

    Raises:
        TrainError: kind `train_setup`: SkyRL cannot be imported, or has other methods than the version that was tested.
    """
    with imports_of("SkyRL", "'episode-engine[skyrl]'"):
        from skyrl.train.generators.base import GeneratorInterface
    check_overrides(EngineEpisodes, GeneratorInterface, "skyrl", {"generate": "input_batch"})
    return type("EngineGenerator", (EngineEpisodes, GeneratorInterface), {"__doc__": EngineEpisodes.__doc__})
