"""slime's `generate` and `generate_rollout`: episodes of a spec over slime's SGLang router. The prompt of a sample is
the id of its task."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, Any

from engine.errors import TrainError
from engine.plugins.sglang.client import SGLangBackend
from engine.plugins.sglang.spec import SGLangBackendSpec
from engine.plugins.trainers.process import OncePerProcess
from engine.plugins.trainers.rollouts import TrainerRollouts
from engine.plugins.trainers.slime.rows import origin_of, samples_of
from engine.plugins.trainers.slime.settings import Settings, refuse_arguments, router_url
from engine.runner.batch import without_signal

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from engine.schemas.environment import Task
    from engine.spec.load import LoadedSpec

_OPEN: OncePerProcess[Settings, SlimeEpisodes] = OncePerProcess()


class SlimeEpisodes(TrainerRollouts):
    """The episodes of a spec for slime. `SlimeEpisodes.of(args)` gives the ones of this process.

    Args:
        spec: The spec, or the path of its file.
        folder: The folder of the training.
        args: slime's arguments.

    Raises:
        SpecError: the spec is invalid.
        TrainError: kind `train_setup`: the spec or an argument does not fit.
    """

    def __init__(self, spec: LoadedSpec | Path | str, folder: Path | str, args: Any) -> None:
        super().__init__(spec, folder, "slime")
        refuse_arguments(args, self.loaded)
        self._groups: dict[int, Task] = {}
        self._numbers: Counter[str] = Counter()
        declared = self.spec.backend
        assert isinstance(declared, SGLangBackendSpec)  # `refuse_arguments` has checked it
        servers = declared.model_copy(update={"urls": [router_url(args)], "launch": None, "router": True})
        self.loop.call(self.start(SGLangBackend.open(servers, self.format, self.loaded)))

    @classmethod
    def of(cls, args: Any) -> SlimeEpisodes:
        """The episodes of slime's arguments; the first call starts them.

        Raises:
            EngineError: as `SlimeEpisodes`; or the router's servers cannot serve this spec.
        """
        settings = Settings.read(args)
        return _OPEN.opened(settings, lambda: cls(settings.spec, settings.folder, args))

    async def samples(self, sample: Any, *, evaluation: bool = False) -> list[Any]:
        """Run one episode of the task that `sample.prompt` names, and make its samples.

        Raises:
            TrainError: kind `train_setup`: there is no such task.
            EngineError: as `Runner.episode`.
        """
        if not isinstance(sample.prompt, str):
            raise TrainError(
                "the prompt of a sample is a list of messages; it must be the id of a task: remove "
                "--apply-chat-template",
                kind="train_setup",
            )
        task = self._task(sample, evaluation)
        number = self._numbers[task.id]
        self._numbers[task.id] += 1
        trajectory = await self._episode(task, number)
        return samples_of(sample, trajectory, self.format.decode, self.format.vision)

    def _task(self, sample: Any, evaluation: bool) -> Task:
        """The task of a sample's group. slime numbers the groups of a training; samples of evaluations have groups of
        their own."""
        if evaluation or sample.group_index is None:
            return self._used(sample.prompt)
        task = self._groups.get(sample.group_index)
        if task is None:
            task = self._groups[sample.group_index] = self._used(sample.prompt)
        elif task.id.rpartition("~")[0] != sample.prompt and task.id != sample.prompt:
            raise TrainError(
                f"group {sample.group_index} has the prompts {task.id!r} and {sample.prompt!r}; a group is of one task",
                kind="train_setup",
            )
        return task

    def stop(self) -> None:
        """Close the run store and the services, and end the loop. Later calls do nothing."""
        _OPEN.forget(self)
        super().stop()


async def generate(args: Any, sample: Any, sampling_params: dict[str, Any], evaluation: bool = False) -> Any:
    """Run one episode: slime's `--custom-generate-function-path`.

    Args:
        args: slime's arguments, with `engine_spec` and `engine_folder`.
        sample: slime's sample; its prompt is the id of a task.
        sampling_params: slime's parameters. The spec's are used, and must have the same temperature.
        evaluation: Whether the episode is of an evaluation.

    Returns:
        A sample, or with `engine_rows: several` a list of samples of one `rollout_id`.

    Raises:
        TrainError: kind `train_setup`: the temperatures differ, or as `SlimeEpisodes`; kind `handover`: the episode has
            several rows.
        EngineError: as `SlimeEpisodes.samples`.
    """
    episodes = await asyncio.to_thread(SlimeEpisodes.of, args)
    given, wanted = sampling_params.get("temperature"), episodes.spec.sampling.temperature
    if given is not None and given != wanted:
        raise TrainError(
            f"slime asks for temperature {given:g}, and {episodes.loaded.path} samples with {wanted:g}; make them "
            "equal",
            kind="train_setup",
        )
    made = await asyncio.wrap_future(episodes.loop.submit(episodes.samples(sample, evaluation=evaluation)))
    if Settings.read(args).rows == "several":
        return made
    if len(made) > 1:
        origin = origin_of(made[0])
        assert origin is not None
        assert origin.trajectory is not None
        raise TrainError(
            f"{origin.trajectory.episode_id} has {len(made)} rows, and slime cannot mix samples with lists of samples: "
            "write `engine_rows: several` into the file of --custom-config-path, or use the rollout function, which "
            "needs no setting",
            kind="handover",
        )
    return made[0]


def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """Run the episodes of one rollout: slime's `--rollout-function-path`.

    With `train.dynamic_sampling`, groups in which every advantage is 0 or that have fewer trainable episodes than
    `train.min_group` are replaced by other groups, `train.max_sampling_rounds` times.

    Args:
        args: slime's arguments, with `engine_spec` and `engine_folder`.
        rollout_id: slime's number of the rollout.
        data_source: Gives groups of samples.
        evaluation: Run the tasks of `args.eval_datasets` instead.

    Returns:
        slime's `RolloutFnTrainOutput`: `rollout_batch_size` groups of samples, or of lists of samples if any episode
        has several rows. For an evaluation `RolloutFnEvalOutput`.

    Raises:
        TrainError: kind `train_setup`: a group is not `n_samples_per_prompt` samples of one task, there is no
            evaluation data, or as `SlimeEpisodes`.
        EngineError: as `SlimeEpisodes.samples`.
    """
    from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput

    episodes = SlimeEpisodes.of(args)
    if evaluation:
        return RolloutFnEvalOutput(data=_evaluated(args, episodes))
    wanted, size = args.rollout_batch_size, args.n_samples_per_prompt
    train = episodes.train
    rounds = train.max_sampling_rounds if train.dynamic_sampling else 1
    staying: list[list[list[Any]]] = []
    equal: list[list[list[Any]]] = []
    sampled = too_small = 0
    for _ in range(rounds):
        groups = data_source.get_samples(wanted - len(staying))
        for group in groups:
            if len(group) != size or len({str(sample.prompt) for sample in group}) != 1:
                raise TrainError(
                    f"a group of slime's data source is not {size} samples of one task: "
                    f"{[sample.prompt for sample in group]}",
                    kind="train_setup",
                )
        sampled += len(groups)
        for made in episodes.loop.call(_run(episodes, groups)):
            origins = [origin_of(rows[0]) for rows in made]
            ended = [origin.trajectory for origin in origins if origin is not None and origin.trajectory is not None]
            small = episodes.rows.is_small(ended, size)
            too_small += small
            replaced = train.dynamic_sampling and (small or without_signal(episodes.rows.rows(ended)))
            (equal if replaced else staying).append(made)
        if len(staying) >= wanted or not groups:
            break
    filled = equal[: wanted - len(staying)]
    handed = [*staying, *filled]
    several = any(len(rows) > 1 for group in handed for rows in group)
    samples = [[rows if several else rows[0] for rows in group] for group in handed]
    metrics = {
        "engine/groups_sampled": sampled,
        "engine/groups_replaced": len(equal) - len(filled),
        "engine/groups_without_signal": len(filled),
        "engine/groups_small": too_small,
        "engine/untrained_episodes": sum(rows[0].remove_sample for group in handed for rows in group),
    }
    return RolloutFnTrainOutput(samples=samples, metrics=metrics)


async def _run(
    episodes: SlimeEpisodes, groups: Sequence[Sequence[Any]], *, evaluation: bool = False
) -> list[list[list[Any]]]:
    return await asyncio.gather(
        *(asyncio.gather(*(episodes.samples(sample, evaluation=evaluation) for sample in group)) for group in groups)
    )


def _evaluated(args: Any, episodes: SlimeEpisodes) -> dict[str, dict[str, list[Any]]]:
    from slime.utils.data import read_file
    from slime.utils.types import Sample

    datasets = getattr(args, "eval_datasets", None)
    if not datasets:
        raise TrainError("slime's arguments name no evaluation data (--eval-prompt-data)", kind="train_setup")
    results = {}
    for dataset in datasets:
        samples = [
            Sample(index=at, prompt=row[dataset.input_key])
            for at, row in enumerate(
                row for row in read_file(dataset.path) for _ in range(dataset.n_samples_per_eval_prompt)
            )
        ]
        (made,) = episodes.loop.call(_run(episodes, [samples], evaluation=True))
        firsts = [rows[0] for rows in made]
        results[dataset.name] = {
            "rewards": [sample.reward for sample in firsts],
            "truncated": [sample.status == Sample.Status.TRUNCATED for sample in firsts],
            "samples": firsts,
        }
    return results
