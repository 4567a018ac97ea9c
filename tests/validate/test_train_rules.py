"""What can go wrong in training is told before anything runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from engine.spec.load import load_spec
from engine.validate import check_spec

pytestmark = pytest.mark.usefixtures("in_folder")

HEAD = """\
spec: episode/v1
name: demo
model: {path: org/m}
tasks: {source: inline, rows: [{q: a}]}
prompt: [{role: user, content: "{{q}}"}]
machine: single_turn
"""
GROUP = "rollout: {samples_per_task: 8}\n"
SERVER = 'backend: {kind: sglang, urls: ["http://127.0.0.1:30000"]}\n'


def found(lines: str) -> list[str]:
    """Findings about training, without their fixes."""
    Path("s.yaml").write_text(HEAD + lines)
    told = [str(item).removeprefix("s.yaml:") for item in check_spec(load_spec("s.yaml"))]
    told = [line for line in told if "[train.eval-on-training-tasks]" not in line]  # has a test of its own
    return [line.partition("; ")[0] for line in told if "[train." in line or "[code." in line]


@pytest.mark.parametrize(
    "lines",
    [
        "rollout: {samples_per_task: 1}\nsampling: {temperature: 0, top_p: 0.9, repetition_penalty: 1.2}\n",
        GROUP + "train: {}\n",
        GROUP + "sampling: {top_p: 1.0, top_k: -1, min_p: 0.0, repetition_penalty: 1.0, logit_bias: {}}\ntrain: {}\n",
        GROUP + "train: {eval: {sampling: {temperature: 0, top_p: 0.9, presence_penalty: 1.0}}}\n",
        GROUP + SERVER + "train: {lora: {}, weight_sync: {method: adapter}}\n",
        GROUP + SERVER + "train: {weight_sync: {method: tensors}}\n",
        GROUP + "backend: {kind: sglang, urls: ['http://gpu-7:30000']}\ntrain: {weight_sync: {method: collective}}\n",
        GROUP + "limits: {assistant_turns: null, episode_tokens: 2048}\ntrain: {}\n",
        GROUP + "limits: {assistant_turns: null}\ntrain: {}\n",
        GROUP + "train: {precision: float32}\n",
        GROUP + "train: {device: cuda}\n",
        GROUP + "limits: {assistant_turns: null}\ntrain: {loss: {kind: dr_grpo, length: 2048}}\n",
        GROUP + "limits: {assistant_turns: 3}\ntrain: {}\n",
        GROUP + "limits: {assistant_turns: null}\ntrain: {loss: {kind: grpo}}\n",
        "train: {}\nrewards: {credit: {method: outcome, baseline: none}}\n",
        "train: {}\nrewards: {credit: {method: outcome, baseline: leave_one_out}}\n",
        "train: {}\nrewards: {credit: {method: gigpo, state_key: q}}\n",
        "train: {dynamic_sampling: false, entropy_coefficient: 0.01}\n",
    ],
)
def test_what_can_be_learnt_from_is_not_complained_of(lines: str) -> None:
    assert found(lines) == []


@pytest.mark.parametrize(
    ("lines", "problems"),
    [
        (
            GROUP + "backend: {kind: scripted, replies: []}\ntrain: {}\n",
            [
                "8:17: error[train.backend] the `scripted` backend takes no new weights, so the model cannot be trained on its replies"
            ],
        ),
        (
            GROUP + 'sampling: {logit_bias: {"3": 1.0}, frequency_penalty: 0.5, json_schema: "{}"}\ntrain: {}\n',
            [
                f"8:{column}: error[train.shifted-sampling] `{key}` changes the probabilities of sampled tokens, "
                "and the trainer cannot recompute that"
                for column, key in ((24, "logit_bias"), (55, "frequency_penalty"), (73, "json_schema"))
            ],
        ),
        (
            GROUP + "train: {critic: {kind: probe}}\n",
            [
                "8:9: error[train.critic] the credit method `turn_return` reads no values, so a critic would be trained for nothing"
            ],
        ),
        (
            "rewards: {credit: {method: gae}}\ntrain: {critic: {kind: head}}\n",
            [],
        ),
        (
            "rewards: {credit: {method: gae}}\nlimits: {images: null}\n"
            "train: {steps: 5, dynamic_sampling: true, critic: {kind: head, clip: 0.2, warmup_steps: 5, bootstrap: [images, context]}}\n",
            [
                "9:37: warning[train.critic-option] with a critic no group is dropped, because advantages are known only when the "
                "batch is trained on",
                "9:70: warning[train.critic-option] `clip` bounds how far values move over the updates of a batch, and the "
                "critic has one update per batch",
                "9:89: warning[train.critic-option] the critic alone is trained for 5 steps, and there are 5: the policy never is",
                "9:104: warning[train.critic-option] the limit `images` is not set, so it ends no episode",
            ],
        ),
        (
            GROUP + SERVER + "train: {weight_sync: {method: collective}, lora: {}}\n",
            ["9:31: error[train.weight-sync] all weights would be sent, but only an adapter is trained"],
        ),
        (
            GROUP
            + "backend: {kind: sglang, urls: ['http://gpu-7:30000'], router: true}\n"
            + "train: {weight_sync: {method: collective}}\n",
            ["9:31: error[train.weight-sync] servers behind a router cannot be called to a process group"],
        ),
        (
            GROUP + SERVER + "train: {weight_sync: {method: collective}, colocate: true}\n",
            [
                "9:31: error[train.weight-sync] NCCL refuses a group in which trainer and server have the same GPU "
                "(`train.colocate`)"
            ],
        ),
        (
            GROUP + "train: {weight_sync: {method: disk}}\n",
            [
                "8:31: warning[train.weight-sync-method] `disk` has no effect: the `local` backend takes weights in memory"
            ],
        ),
    ],
)
def test_what_cannot_be_learnt_from_is_told_at_its_place(lines: str, problems: list[str]) -> None:
    assert found(lines) == problems


def test_bonuses_import_and_can_be_called() -> None:
    Path("train_entries.py").write_text("def curious(row, *, scale=1.0):\n    return row\n\n\nclass Bonus:\n    pass\n")
    lines = GROUP + (
        "train:\n  advantage_bonuses:\n"
        "    - {use: 'train_entries:curious', with: {scale: 2.0}}\n"
        "    - {use: 'train_entries:curious', with: {scal: 2.0}}\n"
        "    - {use: 'train_entries:curios'}\n"
        "    - {use: 'train_entries:Bonus'}\n"
    )
    assert found(lines) == [
        "11:45: error[code.protocol] `train_entries:curious` takes no argument `scal`",
        "12:13: error[code.import] `train_entries` has no `curios`",
        "13:13: error[code.protocol] `train_entries:Bonus` is a class, and a function is called here",
    ]


def test_packages_that_are_missing_are_worth_knowing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    assert found(GROUP + "train: {lora: {}}\n") == [
        "8:15: info[train.no-package] `peft` is not installed, and `engine train` needs it for this"
    ]


@pytest.mark.slow
def test_a_spec_that_trains_is_validated_without_what_trains() -> None:
    Path("s.yaml").write_text(
        HEAD
        + GROUP
        + SERVER
        + "train: {lora: {}, report_to: [tensorboard, wandb], eval: {sampling: {temperature: 0}}}\n"
    )
    code = (
        "import sys\nfrom pathlib import Path\nfrom engine.validate.examine import Options, examine\n"
        "rules = [d.rule for d in examine(Path('s.yaml'), Options(cost=True)).diagnostics]\n"
        "print([rule for rule in rules if not rule.endswith('.no-package')])\n"  # what is installed differs
        "heavy = {'torch', 'transformers', 'peft', 'wandb', 'tensorboard', 'accelerate'}\nprint(sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines() == ["['model.not-at-hand', 'train.eval-on-training-tasks']", "[]"]
