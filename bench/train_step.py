"""One optimizer step on recorded rows, beside trl's GRPOTrainer: the same loss and gradient, then CPU time and memory.

    pip install -c constraints.txt -e '.[bench]'
    python bench/train_step.py                         # Qwen's vocabulary of 151,936 tokens
    python bench/train_step.py --vocabulary 4096       # where the layers count for more than the output layer
    python bench/train_step.py --checkpointing --lora 16
    python bench/train_step.py --precision bfloat16    # ours alone: trl has no float32 master weights

Eight samples of one task: a prompt of 64 tokens and 448 more in four turns, of which 4 x 76 were sampled and 3 x 48 are
observations; 2,432 tokens train. The model is a Qwen3 of random weights, float32, eager, on `--threads` threads. Both sides
load the same files, take the same loss (GRPO's with clip-higher, over log-probs that were recorded before another update) and
step with AdamW.

trl's side is `GRPOTrainer.train()` as a user runs it: its data loader, loss, backward pass, clipping and optimizer, with the
completions, tool mask, advantages and old log-probs handed over in the place of its generation. Ours is `Learner.step`, which
packs the rows anew each time. They take turns in one process, each on weights of its own, and after every step loss and
gradient norm are compared. CPU time is user and system time of the process over each step; the least of the repetitions counts.
Peak memory is another process's for each side.
"""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from engine.store.rows.row import RowEpisode, TrainingRow

SAMPLES, PROMPT, TURN, OBSERVATION, TURNS = 8, 64, 76, 48, 4
COMPLETION = TURNS * TURN + (TURNS - 1) * OBSERVATION
TEMPERATURE, CLIP_LOW, CLIP_HIGH, RATE = 0.9, 0.2, 0.28, 1e-4


def make_model(folder: Path, args: argparse.Namespace) -> Path:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=args.vocabulary,
        hidden_size=args.hidden,
        intermediate_size=3 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 32,
        num_key_value_heads=max(1, args.hidden // 64),
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def make_tokenizer(folder: Path) -> None:
    """trl wants one, though nothing is tokenised."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({"<pad>": 0, "<unk>": 1, "<eos>": 2}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)


def record(folder: Path, vocabulary: int) -> list[TrainingRow]:
    """Rows with the log-probs of a model that is a little off the one that learns."""
    import torch
    from transformers import AutoModelForCausalLM

    draw = np.random.default_rng(0)
    prompt = draw.integers(3, vocabulary, PROMPT)
    mask = np.zeros(PROMPT + COMPLETION, np.int32)
    turns = np.full(PROMPT + COMPLETION, -1, np.int32)
    for turn in range(TURNS):
        start = PROMPT + turn * (TURN + OBSERVATION)
        mask[start : start + TURN], turns[start : start + TURN] = 1, turn
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.model.layers.parameters():
            parameter += 0.01 * torch.randn_like(parameter)
    rows = []
    for sample in range(SAMPLES):
        ids = np.concatenate([prompt, draw.integers(3, vocabulary, COMPLETION)]).astype(np.int32)
        logprobs = np.zeros(len(ids), np.float32)
        tokens = torch.tensor(ids.astype(np.int64))[None]
        with torch.no_grad():
            for start in range(PROMPT, len(ids), 64):
                states = model.model(tokens).last_hidden_state[0, start - 1 : start + 63]
                chances = (model.lm_head(states) / TEMPERATURE).log_softmax(-1)
                labels = tokens[0, start : start + 64, None]
                logprobs[start : start + 64] = chances[: len(labels)].gather(1, labels)[:, 0].numpy()
        rows.append(
            TrainingRow.of_tokens(
                ids,
                mask,
                turn_ids=turns,
                logprobs=logprobs * mask,
                advantages=np.full(len(ids), draw.normal(), np.float32),
                episode=RowEpisode(task_id="a", episode_id=f"a-{sample}"),
            )
        )
    return rows


class Ours:
    """`Learner.step`, as `engine train` calls it."""

    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        from engine.schemas.sections import read_stored
        from engine.schemas.train import TrainSpec
        from engine.train.learner import Learner
        from engine.train.policy import Policy

        spec = read_stored(
            {
                "device": "cpu",
                "precision": args.precision,
                "proximal_logprobs": "sampler",
                "rollout_correction": {"kind": "none"},
                "loss": {"kind": "grpo", "clip_low": CLIP_LOW, "clip_high": CLIP_HIGH},
                "optimizer": {"lr": RATE},
                "lora": {"rank": args.lora, "alpha": 2.0 * args.lora} if args.lora else None,
                "memory": {"gradient_checkpointing": args.checkpointing},
            },
            TrainSpec,
        )
        self._learner = Learner(Policy.load(folder, spec, temperature=TEMPERATURE, vocab=None, vision=None), spec)
        self.policy = self._learner.policy

    def step(self, rows: list[TrainingRow]) -> tuple[float, float]:
        """Loss and gradient norm."""
        told = self._learner.step(rows, 0)
        return told["loss"], told["grad_norm"]


def theirs(folder: Path, rows: list[TrainingRow], args: argparse.Namespace, steps: int, each: Any) -> None:
    """`GRPOTrainer.train()`; `each(loss, gradient norm, CPU seconds)` is called after every step."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    ids = torch.tensor(np.stack([row.branch.input_ids for row in rows]).astype(np.int64))
    mask = torch.tensor(np.stack([row.branch.loss_mask for row in rows]).astype(np.int64))[:, PROMPT:]
    batch = {
        "prompt_ids": ids[:, :PROMPT],
        "prompt_mask": torch.ones(len(rows), PROMPT, dtype=torch.int64),
        "completion_ids": ids[:, PROMPT:],
        "completion_mask": torch.ones(len(rows), COMPLETION, dtype=torch.int64),
        "tool_mask": mask,
        "advantages": torch.tensor([float(row.advantages.mean()) for row in rows]),
        "old_per_token_logps": torch.tensor(np.stack([row.branch.logprobs for row in rows]))[:, PROMPT:],
        "num_items_in_batch": mask.sum(),
    }

    class Given(GRPOTrainer):  # type: ignore[misc]
        """Takes recorded completions in the place of generating some."""

        def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
            return dict(batch)

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            found = super().training_step(*args, **kwargs)
            clock.loss = float(found)
            return found

    class Clock(TrainerCallback):  # type: ignore[misc]
        loss = norm = began = 0.0

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            gc.collect()
            self.began = time.process_time()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            each(self.loss, self.norm, time.process_time() - self.began)

    clock = Clock()
    peft = None
    if args.lora:
        from peft import LoraConfig

        peft = LoraConfig(
            task_type="CAUSAL_LM", r=args.lora, lora_alpha=2 * args.lora, target_modules="all-linear", lora_dropout=0.0
        )
    with tempfile.TemporaryDirectory() as out:
        config = GRPOConfig(
            output_dir=out,
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=SAMPLES,
            num_generations=SAMPLES,
            max_completion_length=COMPLETION,
            loss_type="grpo",
            epsilon=CLIP_LOW,
            epsilon_high=CLIP_HIGH,
            beta=0.0,
            temperature=TEMPERATURE,
            learning_rate=RATE,
            lr_scheduler_type="constant",
            weight_decay=0.0,
            max_grad_norm=1.0,
            gradient_checkpointing=args.checkpointing,
            max_steps=steps,
            logging_strategy="no",
            log_level="error",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = Given(
            model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=config,
            train_dataset=Dataset.from_dict({"prompt": ["a"] * (steps * SAMPLES)}),
            processing_class=AutoTokenizer.from_pretrained(folder),
            peft_config=peft,
            callbacks=[clock],
        )
        if args.lora:  # the same first matrices
            given = {name.replace("model.", "", 1): tensor for name, tensor in _adapter(folder, args).items()}
            own = {name.removeprefix("base_model.model.model."): p for name, p in trainer.model.named_parameters()}
            with torch.no_grad():
                for name, tensor in given.items():
                    own[name].copy_(tensor)
        trainer.remove_callback(PrinterCallback)
        clip = trainer.accelerator.clip_grad_norm_

        def watched(*args: Any, **kwargs: Any) -> Any:
            found = clip(*args, **kwargs)
            clock.norm = float(found)
            return found

        trainer.accelerator.clip_grad_norm_ = watched
        trainer.train()


def _adapter(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    return Ours(folder, args).policy.state()


def compare(folder: Path, rows: list[TrainingRow], args: argparse.Namespace) -> None:
    """Both sides in turns."""
    ours = Ours(folder, args)
    times: dict[str, list[float]] = {"ours": [], "trl": []}

    def each(loss: float, norm: float, seconds: float) -> None:
        gc.collect()
        began = time.process_time()
        own_loss, own_norm = ours.step(rows)
        times["ours"].append(time.process_time() - began)
        times["trl"].append(seconds)
        off = abs(own_loss - loss) / max(abs(loss), 0.1), abs(own_norm - norm) / norm
        print(
            f"step {len(times['trl'])}: loss {own_loss:.7f} (trl {loss:.7f}), gradient norm {own_norm:.7f} (trl {norm:.7f}), "
            f"CPU {times['ours'][-1]:.2f} s (trl {seconds:.2f} s)"
        )
        if len(times["trl"]) == 1 and max(off) > 1e-5:  # later steps start from weights that have drifted apart
            raise SystemExit(f"not the same: loss {off[0]:.2g} and gradient norm {off[1]:.2g} apart, of at most 1e-5")

    theirs(folder, rows, args, args.repetitions, each)
    least = {name: min(found[1:]) for name, found in times.items()}
    print(f"CPU time: {least['ours']:.2f} s, trl {least['trl']:.2f} s: {least['ours'] / least['trl']:.2f}x")


def alone(folder: Path, rows: list[TrainingRow], args: argparse.Namespace) -> None:
    """Our side only."""
    ours, times = Ours(folder, args), []
    for _ in range(args.repetitions):
        gc.collect()
        began = time.process_time()
        ours.step(rows)
        times.append(time.process_time() - began)
    print(f"CPU time: {min(times[1:]):.2f} s")


def peak(side: str, folder: Path, rows: list[TrainingRow], args: argparse.Namespace) -> None:
    """Two steps of one side; prints the process's highest memory, in MB."""
    if side == "ours":
        ours = Ours(folder, args)
        for _ in range(2):
            ours.step(rows)
    else:
        theirs(folder, rows, args, 2, lambda *_: None)
    # Of this program alone: a child's `ru_maxrss` begins with its parent's.
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    print(f"peak {int(line.split()[1]) / 1024:.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repetitions", type=int, default=6)
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--precision", choices=["float32", "mixed", "bfloat16"], default="float32")
    parser.add_argument("--lora", type=int, default=0, metavar="RANK")
    parser.add_argument("--memory-of", choices=["ours", "trl"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    warnings.filterwarnings("ignore")
    import torch
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(args.threads)
    if args.memory_of:
        rows = list(np.load(args.folder / "rows.npy", allow_pickle=True))
        peak(args.memory_of, args.folder, rows, args)
        return
    with tempfile.TemporaryDirectory() as made:
        folder = make_model(Path(made), args)
        make_tokenizer(folder)
        rows = record(folder, args.vocabulary)
        np.save(folder / "rows.npy", np.array(rows, dtype=object), allow_pickle=True)
        trained = sum(len(row.places) for row in rows)
        print(
            f"{len(rows)} x ({PROMPT} + {COMPLETION}) tokens, {TURNS} turns, {trained:,} trained; vocabulary {args.vocabulary:,}, "
            f"hidden {args.hidden}, {args.layers} layers, {args.threads} threads"
        )
        sides = ["ours", "trl"] if args.precision == "float32" else ["ours"]
        if len(sides) > 1:
            compare(folder, rows, args)
        else:
            alone(folder, rows, args)
        peaks = {}
        for side in sides:
            command = [sys.executable, __file__, *sys.argv[1:], "--memory-of", side, "--folder", str(folder)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            peaks[side] = float(done.stdout.split("peak ")[1])
        print("peak memory: " + ", ".join(f"{side} {size:.0f} MB" for side, size in peaks.items()))


if __name__ == "__main__":
    main()
