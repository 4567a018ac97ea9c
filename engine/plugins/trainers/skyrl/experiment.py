"""SkyRL's experiment and trainer on episodes of a spec. Users start from `EnginePPOExp`.

Invariant: no update is made with a batch whose sums are not those of the engine's rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.errors import TrainError
from engine.plugins.trainers.handover import SeveralRows
from engine.plugins.trainers.library import check_overrides, imports_of
from engine.plugins.trainers.rollouts import TrainerRollouts
from engine.plugins.trainers.skyrl.generator import generator_class
from engine.plugins.trainers.skyrl.handover import register_estimator
from engine.plugins.trainers.skyrl.settings import refuse_settings
from engine.spec.load import load_spec

if TYPE_CHECKING:
    from engine.spec.load import LoadedSpec


class TaskPrompts:
    """The data set of a spec's tasks, with the methods of SkyRL's PromptDataset. A prompt holds the task's id, which the model does not see.

    Args:
        ids: The ids of the tasks.
    """

    def __init__(self, ids: Sequence[str]) -> None:
        self._ids = list(ids)

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, place: int) -> tuple[list[dict[str, str]], None, dict[str, str], str]:
        task = self._ids[place]
        return [{"role": "user", "content": task}], None, {"task": task}, str(place)

    def collate_fn(self, items: Sequence[tuple[Any, ...]]) -> list[dict[str, Any]]:
        """The batch that SkyRL's `prepare_generator_input` reads."""
        return [dict(zip(("prompt", "env_class", "env_extras", "uid"), item, strict=True)) for item in items]


class EngineTrainer:
    """The methods of the trainer. `trainer_class` adds SkyRL's RayPPOTrainer."""

    generator: Any
    all_metrics: dict[str, Any]

    async def train(self) -> None:
        """Train, and close the run store at the end."""
        try:
            await super().train()  # type: ignore[misc]
        finally:
            await self.generator.close()

    def postprocess_generator_output(self, generator_output: Any, uids: list[str], *rest: Any, **more: Any) -> Any:
        """SkyRL's own, and then its metrics of rewards, which it computes from advantages, are replaced or removed."""
        found = super().postprocess_generator_output(generator_output, uids, *rest, **more)  # type: ignore[misc]
        for name in [name for name in self.all_metrics if name.startswith("reward/")]:
            del self.all_metrics[name]
        self.all_metrics["reward/avg_raw_reward"] = self.generator.metrics["reward/mean"]
        return found

    def compute_advantages_and_returns(self, data: Any) -> Any:
        """SkyRL's own, and then the sums of both sides of the hand-over are compared.

        Raises:
            TrainError: kind `handover`: they differ. No update is made with the batch.
        """
        data = super().compute_advantages_and_returns(data)  # type: ignore[misc]
        self.generator.check(data)
        return data


class EngineExperiment:
    """The methods of the experiment. `experiment_class` adds SkyRL's BasePPOExp.

    >>> EnginePPOExp(cfg, "spec.yaml", "runs/with-skyrl").run()

    Args:
        cfg: SkyRL's `SkyRLTrainConfig`, with `trainer.algorithm.advantage_estimator` set to `engine`.
        spec: The spec, or the path of its file.
        folder: The folder of the training; the run store is `rollouts` in it.
        several_rows: What happens to an episode with several rows, since SkyRL takes one for each prompt.

    Raises:
        SpecError: the spec is invalid.
        TrainError: kind `train_setup`: a setting of SkyRL or something of the spec would be lost; the message names all of them.
    """

    def __init__(
        self, cfg: Any, spec: LoadedSpec | Path | str, folder: Path | str, *, several_rows: SeveralRows = "refuse"
    ) -> None:
        loaded = load_spec(spec) if isinstance(spec, str | Path) else spec
        register_estimator()
        refuse_settings(cfg, loaded)
        self.episodes = TrainerRollouts(loaded, folder, "skyrl")
        self._several = several_rows
        wanted = cfg.trainer.train_batch_size
        if len(self.episodes.tasks) < wanted:
            raise TrainError(
                f"trainer.train_batch_size is {wanted}, and {loaded.path} has {len(self.episodes.tasks)} tasks; make it smaller",
                kind="train_setup",
            )
        super().__init__(cfg)  # type: ignore[call-arg]

    def get_train_dataset(self) -> TaskPrompts:
        """The tasks of the spec; `data.train_data` is not read."""
        return TaskPrompts(self.episodes.tasks)

    def get_eval_dataset(self) -> None:
        """None: evaluate with `engine eval`."""

    def get_generator(self, cfg: Any, tokenizer: Any, inference_engine_client: Any) -> Any:
        """The generator that runs the episodes."""
        from skyrl.backends.skyrl_train.inference_servers.utils import resolve_policy_model_name

        name = resolve_policy_model_name(cfg)
        return generator_class()(self.episodes, inference_engine_client, model=name, several_rows=self._several)

    def get_trainer(self, *args: Any, **kwargs: Any) -> Any:
        """The trainer that compares the sums."""
        return trainer_class()(*args, **kwargs)


@cache
def trainer_class() -> type[Any]:
    """SkyRL's RayPPOTrainer with the methods of `EngineTrainer`.

    Raises:
        TrainError: kind `train_setup`: SkyRL cannot be imported, or has other methods than the version that was tested.
    """
    with imports_of("SkyRL", "'episode-engine[skyrl]'"):
        from skyrl.train.trainer import RayPPOTrainer
    overrides = {
        "train": "",
        "postprocess_generator_output": "generator_output, uids, metrics_generator_output, metrics_uids",
        "compute_advantages_and_returns": "data",
    }
    check_overrides(EngineTrainer, RayPPOTrainer, "skyrl", overrides)
    return type("EngineSkyRLTrainer", (EngineTrainer, RayPPOTrainer), {"__doc__": EngineTrainer.__doc__})


@cache
def experiment_class() -> type[Any]:
    """SkyRL's BasePPOExp with the methods of `EngineExperiment`.

    Raises:
        TrainError: kind `train_setup`: SkyRL cannot be imported, or has other methods than the version that was tested.
    """
    with imports_of("SkyRL", "'episode-engine[skyrl]'"):
        from skyrl.train.entrypoints.main_base import BasePPOExp
    overrides = {
        "__init__": "cfg",
        "get_train_dataset": "",
        "get_eval_dataset": "",
        "get_generator": "cfg, tokenizer, inference_engine_client",
        "get_trainer": "cfg, tracker, tokenizer, train_dataset, eval_dataset, inference_engine_client, generator, colocate_pg",
    }
    check_overrides(EngineExperiment, BasePPOExp, "skyrl", overrides)
    return type("EnginePPOExp", (EngineExperiment, BasePPOExp), {"__doc__": EngineExperiment.__doc__})
