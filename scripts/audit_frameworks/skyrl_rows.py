"""Rows of SkyRL: its own `SkyRLGymGenerator` over a scripted inference engine client, with environments of skyrl-gym. Run with a Python that has skyrl.

python scripts/audit_frameworks/skyrl_rows.py TOKENIZERS OUT qwen2_5 …
"""

from __future__ import annotations

import asyncio
import pickle
import typing
from importlib.metadata import version
from pathlib import Path
from typing import Any

import typing_extensions

typing.TypedDict = typing_extensions.TypedDict  # type: ignore[assignment]  # pydantic needs it on Python 3.11

import skyrl_gym  # noqa: E402
from scripted import SAMPLES, TASKS, Sampler, cli, load, model_folder, prompt_of, right, write_about  # noqa: E402
from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch  # noqa: E402
from skyrl.train.config.config import ChatTemplateConfig, GeneratorConfig, SkyRLGymConfig  # noqa: E402
from skyrl.train.dataset.preprocess import convert_prompts_responses_to_batch_tensors  # noqa: E402
from skyrl.train.generators.base import TrajectoryID  # noqa: E402
from skyrl.train.generators.skyrl_gym_generator import SkyRLGymGenerator  # noqa: E402
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput  # noqa: E402


class Sums(BaseTextEnv):
    """An environment that says once that an answer is wrong, and rewards the right one."""

    def __init__(self, env_config: Any = None, extras: Any = None) -> None:
        super().__init__()
        self.task = (extras or {})["task"]
        self.max_turns = (extras or {}).get("max_turns", 1)

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        done = self.turns >= self.max_turns
        messages = [] if done else [{"role": "user", "content": "That is not right. Try again."}]
        return BaseTextEnvStepOutput(observations=messages, reward=right(self.task, action), done=done, metadata={})


skyrl_gym.register("sums", entry_point=Sums)


class Client:
    """Stands where SkyRL's inference engines would."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler
        self.turns: dict[str, int] = {}

    async def generate(self, engine_input: dict[str, Any], model: str | None = None) -> dict[str, Any]:
        session = engine_input["session_ids"][0]
        task, sample = map(int, session.split("_"))
        turn = self.turns.get(session, 0)
        self.turns[session] = turn + 1
        ids, logprobs, finish, _ = self.sampler.reply(engine_input["prompt_token_ids"][0], task, sample, turn)
        text = self.sampler.tokenizer.decode(ids, skip_special_tokens=True)
        return {
            "responses": [text],
            "response_ids": [list(ids)],
            "stop_reasons": [finish],
            "response_logprobs": [list(logprobs)],
        }

    async def finish_session(self, session: str) -> None: ...


SETTINGS: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "single": ("`SkyRLGymGenerator`", {"max_turns": 1}, []),
    "turns": ("`SkyRLGymGenerator`, two turns", {"max_turns": 2}, ["Perhaps the answer of {expression} is 40."]),
    "one_message": (
        "`use_conversation_multi_turn=False`, stop string `</search>`",
        {"max_turns": 2, "use_conversation_multi_turn": False},
        ["<search>{expression}</search>"],
    ),
    "custom_template": (
        "`chat_template: qwen3_without_thinking`",
        {"max_turns": 2, "chat_template": ChatTemplateConfig(source="name", name_or_path="qwen3_without_thinking")},
        ["Perhaps the answer of {expression} is 40."],
    ),
}


async def rows(sampler: Sampler, config: GeneratorConfig, logprobs: bool) -> Any:
    config.sampling_params.logprobs = 0 if logprobs else None
    if not config.use_conversation_multi_turn:
        config.sampling_params.stop = ["</search>"]
    client = Client(sampler)
    if not logprobs:
        inner = client.generate

        async def without(engine_input: dict[str, Any], model: str | None = None) -> dict[str, Any]:
            return {**await inner(engine_input, model), "response_logprobs": None}

        client.generate = without  # type: ignore[method-assign]
    generator = SkyRLGymGenerator(config, SkyRLGymConfig(max_env_workers=0), client, sampler.tokenizer)
    places = [(task, sample) for task in range(len(TASKS)) for sample in range(SAMPLES)]
    return await generator.generate(
        {
            "prompts": [prompt_of(task) for task, _ in places],
            "env_classes": ["sums"] * len(places),
            "env_extras": [{"task": task} for task, _ in places],
            "sampling_params": None,
            "trajectory_ids": [TrajectoryID(instance_id=str(task), repetition_id=sample) for task, sample in places],
            "batch_metadata": None,
        }
    )


def write_batch(made: Any, tokenizer: Any, file: Path) -> None:
    """The file of `trainer.dump_data_batch`: SkyRL's own tensors of a `GeneratorOutput`, without what its trainer removes before it writes them."""
    names = ("prompt_token_ids", "response_ids", "rewards", "loss_masks", "rollout_logprobs")
    tensors = convert_prompts_responses_to_batch_tensors(
        tokenizer, *(made[name] for name in names), None, max_seq_len=4096
    )
    sequences, attention, response, _, loss, logprobs, _ = tensors
    columns = {
        "sequences": sequences,
        "attention_mask": attention,
        "response_mask": response,
        "loss_mask": loss,
        "rollout_logprobs": logprobs,
    }
    batch = TrainingInputBatch(columns)
    batch.metadata = {"response_length": int(response.shape[1])}
    batch.save(str(file))


def main() -> None:
    tokenizers, out, templates = cli()
    for template in templates:
        tokenizer = load(model_folder(template, tokenizers, out))
        place = out / "skyrl" / template
        place.mkdir(parents=True, exist_ok=True)
        settings, failed = {}, {}
        for setting, (title, keys, asks) in SETTINGS.items():
            if setting == "custom_template" and template != "qwen3":
                continue  # it is Qwen3's
            sampler = Sampler(tokenizer, template, asks, ends=("</search>",))
            try:
                made = asyncio.run(
                    rows(sampler, GeneratorConfig(max_input_length=2048, **keys), setting != "custom_template")
                )
                with (place / f"{setting}.pkl").open("wb") as file:
                    pickle.dump(dict(made), file)
                sampler.write(place / f"{setting}.sampled.jsonl")
                settings[setting] = f"{title}|{setting}.pkl"
                if setting == "turns":
                    write_batch(made, tokenizer, place / "batch.pkl")
                    sampler.write(place / "batch.sampled.jsonl")
                    settings["batch"] = "`dump_data_batch`, two turns|batch.pkl"
            except Exception as error:  # noqa: BLE001 - what a framework refuses is part of the result
                failed[setting] = f"{title}|{type(error).__name__}: {error}"
        versions = {name: version(name) for name in ("skyrl", "skyrl-gym", "transformers")}
        write_about(out, "skyrl", template, settings, versions, failed)


if __name__ == "__main__":
    main()
