"""Settings of other projects that `extends:` knows by name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from installed_plugins import needs_plugin

from engine.schemas.sections import dump
from engine.spec.access import Access
from engine.spec.load import load_spec, read_spec
from engine.spec.resolve import PUBLISHED, published_file, published_names
from engine.validate import check_spec

ROOT = Path(__file__).parents[3]
NAMES = ["areal-vlm-grpo", "slime-geo3k-grpo", "verl-gsm8k-grpo"]
READ = [
    pytest.param("areal-vlm-grpo", marks=needs_plugin("evaluation")),
    "slime-geo3k-grpo",
    pytest.param("verl-gsm8k-grpo", marks=[needs_plugin("evaluation"), needs_plugin("preparing")]),
]
"""The same, each with the plugins whose keys it has."""
OWN = """\
spec: episode/v1
name: own
tasks: {source: inline, rows: [{q: a}]}
prompt: [{role: user, content: "{{q}}"}]
machine: single_turn
"""


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "specs").symlink_to(ROOT / "specs")
    monkeypatch.chdir(tmp_path)


def test_the_names() -> None:
    assert published_names() == NAMES


@pytest.mark.parametrize("name", READ)
def test_a_spec_that_extends_one_is_valid_also_for_a_stranger(name: str, tmp_path: Path) -> None:
    Path("s.yaml").write_text(f"extends: {name}\n{OWN}")
    loaded, problems = read_spec("s.yaml", access=Access.for_spec(tmp_path / "s.yaml"))
    assert problems == []
    assert loaded is not None
    assert loaded.spec.rewards.credit.model_dump() == {"baseline": "mean", "scale": "std", "method": "outcome"}
    assert [str(item) for item in check_spec(loaded) if item.severity == "error"] == []


@needs_plugin("weights")
@pytest.mark.parametrize("number", range(3))
def test_the_examples_of_the_documentation_are_valid(number: int) -> None:
    examples = re.findall(r"```yaml\n(# .*?extends:.*?)```", (ROOT / "docs/published.md").read_text(), re.S)
    assert len(examples) == 3
    Path("s.yaml").write_text(examples[number])
    assert [str(item) for item in check_spec(load_spec("s.yaml")) if item.severity == "error"] == []


@needs_plugin("preparing")
@needs_plugin("evaluation")
def test_the_values_are_those_of_the_sources() -> None:
    found = {}
    for name in NAMES:
        Path("s.yaml").write_text(f"extends: {name}\n{OWN}")
        spec = load_spec("s.yaml").spec
        train = spec.train
        assert train is not None
        loss, optimizer = train.loss, train.optimizer
        found[name] = (
            (spec.model.path, spec.rollout.samples_per_task, train.tasks_per_step, spec.limits.assistant_turns),
            (spec.limits.turn_tokens, spec.limits.episode_tokens),
            loss.model_dump(),
            (optimizer.lr, optimizer.betas, optimizer.weight_decay),
            (train.kl.coefficient, train.rollout_correction.kind, train.advantage_norm, train.asynchrony.max_staleness),
        )
    assert found == {
        "verl-gsm8k-grpo": (
            ("Qwen/Qwen2.5-3B-Instruct", 16, 256, 5),
            (1024, 2048),
            {"clip_low": 0.2, "clip_high": 0.2, "delta": 3.0, "kind": "bnpo"},
            (1e-6, [0.9, 0.999], 0.01),
            (0.001, "none", "none", 0),
        ),
        "slime-geo3k-grpo": (
            ("Qwen/Qwen3-VL-2B-Instruct", 8, 64, 3),
            (4095, 4096),
            {"clip_low": 0.2, "clip_high": 0.28, "delta": None, "kind": "grpo"},
            (1e-6, [0.9, 0.98], 0.1),
            (0.0, "none", "none", 0),
        ),
        "areal-vlm-grpo": (
            ("Qwen/Qwen2.5-VL-3B-Instruct", 4, 32, 1),
            (512, None),
            {"clip_low": 0.4, "clip_high": 0.4, "delta": None, "kind": "bnpo"},
            (2e-6, [0.9, 0.999], 0.01),
            (0.0, "mask", "batch", 4),
        ),
    }


@pytest.mark.parametrize("name", NAMES)
def test_each_file_names_repository_files_and_commits_and_what_it_does_not_carry(name: str) -> None:
    text = Path(published_file(name)).read_text()
    assert re.search(r"^# Source: github\.com/\S+/\S+$", text, re.M)
    sources = set(re.findall(r"^#.*?\[(\w+)\] +\S+", text, re.M)) | set(re.findall(r"· \[(\w+)\] +\S+", text))
    assert re.findall(r"\b[0-9a-f]{40}\b", text)
    assert len(re.findall(r"^# not carried: ", text, re.M)) >= 3
    used = {tag for line in text.splitlines() if not line.startswith("#") for tag in re.findall(r"# \[(\w+)\]", line)}
    assert used
    assert used <= sources


def test_an_unknown_name_lists_the_known_ones() -> None:
    Path("s.yaml").write_text(f"extends: verl-gsm8k-ppo\n{OWN}")
    loaded, problems = read_spec("s.yaml")
    assert loaded is None
    assert str(problems[0]) == (
        "s.yaml:1:10: error[spec.extends] there is neither a file nor published settings of the name `verl-gsm8k-ppo`; "
        "did you mean `verl-gsm8k-grpo`? published settings are areal-vlm-grpo, slime-geo3k-grpo, verl-gsm8k-grpo; "
        "a file has its suffix: `base.yaml`"
    )


def test_a_file_of_that_name_beside_the_spec_comes_first() -> None:
    Path("verl-gsm8k-grpo").write_text("rollout: {samples_per_task: 3}\nmodel: {path: mine}\n")
    Path("s.yaml").write_text(f"extends: verl-gsm8k-grpo\n{OWN}")
    spec = load_spec("s.yaml").spec
    assert (spec.model.path, spec.rollout.samples_per_task, spec.train) == ("mine", 3, None)


def test_the_own_keys_win() -> None:
    Path("s.yaml").write_text(f"extends: slime-geo3k-grpo\n{OWN}train: {{optimizer: {{lr: 1.0e-5}}}}\n")
    spec = load_spec("s.yaml").spec
    assert spec.train is not None
    assert (spec.train.optimizer.lr, spec.train.optimizer.weight_decay) == (1e-5, 0.1)


@needs_plugin("preparing")
@needs_plugin("evaluation")
def test_a_loss_of_another_kind_takes_no_keys_of_the_published_one() -> None:
    Path("s.yaml").write_text(f"extends: verl-gsm8k-grpo\n{OWN}train: {{loss: {{kind: reinforce}}}}\n")
    for overrides, kind in (((), "reinforce"), (("train.loss.kind=sapo",), "sapo")):
        train = load_spec("s.yaml", overrides).spec.train
        assert train is not None
        assert (train.loss.kind, train.tasks_per_step) == (kind, 256)


def test_the_files_are_package_data() -> None:
    assert '"engine.spec" = ["published/*.yaml"]' in (ROOT / "pyproject.toml").read_text()
    assert PUBLISHED == ROOT / "engine/spec/published"


@pytest.mark.parametrize("name", READ)
def test_a_resolved_spec_with_every_default_can_be_written_and_read_again(name: str) -> None:
    """Also pairs such as `train.optimizer.betas`: YAML has lists."""
    Path("s.yaml").write_text(f"extends: {name}\n{OWN}")
    spec = load_spec("s.yaml").spec
    Path("whole.yaml").write_text(yaml.safe_dump(dump(spec)))
    assert load_spec("whole.yaml").spec == spec


def told(text: str) -> list[str]:
    Path("s.yaml").write_text(text)
    found = [f"{item.origin.line}: {item.message}" for item in check_spec(load_spec("s.yaml"))]
    return [line for line in found if "`train.steps`" in line or "not comparable" in line]


@needs_plugin("preparing")
@needs_plugin("evaluation")
@pytest.mark.parametrize(
    ("train", "messages"),
    [
        ("{}", []),
        ("{seed: 3}", []),
        ("{steps: 435}", []),
        (
            "{steps: 20}",
            [
                "2: `verl-gsm8k-grpo` trains for 435 steps of 256 groups, and this spec for 20 steps of 256 groups: results are not "
                "comparable"
            ],
        ),
        (
            "{epochs: 512}",
            [
                "2: `verl-gsm8k-grpo` trains for 435 steps of 256 groups, and this spec for 512 epochs = 2 steps of 256 groups: results "
                "are not comparable"
            ],
        ),
        (
            "{tasks_per_step: 8}",
            [
                "2: `verl-gsm8k-grpo` trains for 435 steps of 256 groups, and this spec for 435 steps of 8 groups: results are not "
                "comparable"
            ],
        ),
    ],
)
def test_another_length_than_the_published_one_is_reported(train: str, messages: list[str]) -> None:
    """`steps` of the settings beside `epochs` of the spec is reported once, at the key of the spec."""
    assert told(f"extends: verl-gsm8k-grpo\ntrain: {train}\n{OWN}") == messages


def test_epochs_of_an_extended_spec_make_steps_without_effect() -> None:
    Path("base.yaml").write_text(
        f"{OWN}model: {{path: org/m}}\nrollout: {{samples_per_task: 4}}\ntrain: {{epochs: 3}}\n"
    )
    text = "extends: base.yaml\nspec: episode/v1\nname: own\ntrain: {steps: 5}\n"
    assert told(text) == ["4: `train.steps` has no effect: `train.epochs` sets the number of steps"]
    Path("base.yaml").write_text(
        f"{OWN}model: {{path: org/m}}\nrollout: {{samples_per_task: 4}}\ntrain: {{steps: 3}}\n"
    )
    assert told(text.replace("steps: 5", "epochs: 5")) == []
