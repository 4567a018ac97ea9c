"""Learning curves of credit methods with and without a critic, on the sorting office of specs/train_critic.yaml.

    python bench/critic_curves.py                               five settings, three seeds: about half an hour on two cores
    python bench/critic_curves.py --seeds 0 --only turn_ppo     one training
    python bench/critic_curves.py --write docs/credit.md        and write the table between the marks of the document
    python bench/critic_curves.py --out runs/curves             keep the trainings; those that are there are not trained again

Eight turns per episode, each right (+1/8) or wrong (-1/8) by itself. Every setting trains on the same number of episodes: 24 steps of
64. `turn_return` with `gamma: 0` uses the fact that a turn decides about its own reward only; no other setting does.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from engine.spec.load import load_spec
from engine.store import training as folders
from engine.store.header import RunHeader
from engine.train.metrics import read_metrics
from engine.train.trainer import Trainer

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- bench/critic_curves.py: begin -->\n", "<!-- bench/critic_curves.py: end -->\n"
SETTINGS: dict[str, tuple[str, list[str]]] = {
    "turn_return, gamma 0": ("train_credit", []),
    "turn_return": ("train_credit", ["rewards.credit={method: turn_return}"]),
    "turn_ppo": ("train_critic", []),
    "bilevel_gae": ("train_critic", ["rewards.credit={method: bilevel_gae, gamma: 1.0, lam: 0.3}"]),
    "gae": ("train_critic", ["rewards.credit={method: gae, gamma: 1.0, lam: 0.7}"]),
}
"""By name: the spec and its overrides. A turn has about three tokens, so `lam: 0.7` by token is about 0.3 by turn."""
SHOWN = (1, 4, 8, 12, 16, 20, 24)
"""Steps of the table; each is the mean with the step before it, to even out the noise of sampling."""


def model_of(seed: int, folder: Path) -> Path:
    """A tiny model that knows the format of a reply and answers with any gate."""
    path = folder / f"tiny-lm-{seed}"
    if not path.is_dir():
        script = [sys.executable, str(ROOT / "scripts/make_tiny_lm.py"), str(path)]
        subprocess.run([*script, "--teach", "200", "--seed", str(seed)], check=True, stdout=subprocess.DEVNULL)
    return path


def train(name: str, seed: int, out: Path) -> list[dict[str, Any]]:
    """Train one setting, or read what an earlier call trained. Returns the lines of its metrics."""
    spec, overrides = SETTINGS[name]
    folder = out / f"{name.replace(', ', '-').replace(' ', '')}-{seed}"
    done = sorted(folder.glob("*/metrics.jsonl"))
    if done and len(lines := read_metrics(done[0].parent)) == 24:
        return lines
    changes = [f"model.path={model_of(seed, out)}", f"train.seed={seed}", f"rollout.seed={seed}", *overrides]
    loaded = load_spec(ROOT / "specs" / f"{spec}.yaml", changes)
    trainer = Trainer(loaded, folders.begin(folder, RunHeader.of(loaded, overrides=changes)))
    asyncio.run(trainer.run())
    return read_metrics(trainer.folder)


def smoothed(lines: Sequence[dict[str, Any]], metric: str, step: int) -> float:
    """The mean of a metric over a step and the one before it."""
    return fmean(line[metric] for line in lines if line["step"] in (step - 1, step) and line.get(metric) is not None)


def table(found: dict[str, list[list[dict[str, Any]]]]) -> str:
    """Mean reward over seeds by step, the lowest and highest seed at the end, and the explained variance of the critic."""
    head = ["`method`", *[f"step {step}" for step in SHOWN], "seeds at the end", "explained variance"]
    body = []
    for name, runs in found.items():
        cells = [f"{fmean(smoothed(lines, 'reward/mean', step) for lines in runs):+.2f}" for step in SHOWN]
        ends = sorted(smoothed(lines, "reward/mean", SHOWN[-1]) for lines in runs)
        explained = "–"
        if "critic/explained_variance" in runs[0][-1]:
            explained = f"{fmean(smoothed(lines, 'critic/explained_variance', SHOWN[-1]) for lines in runs):.2f}"
        body.append([f"`{name}`", *cells, f"{ends[0]:+.2f} to {ends[-1]:+.2f}", explained])
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, ["---"] * len(head), *body))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", choices=list(SETTINGS), default=list(SETTINGS), metavar="SETTING")
    parser.add_argument("--out", type=Path, help="folder of the trainings; default: a temporary one")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the table between the marks of this file")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        out = options.out or Path(temporary)
        found: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in options.only}
        for seed in options.seeds:
            for name in options.only:
                lines = train(name, seed, out)
                found[name].append(lines)
                print(f"{name}, seed {seed}: {smoothed(lines, 'reward/mean', SHOWN[-1]):+.2f}", flush=True)
    many = len(options.seeds) > 1
    named = ", ".join(map(str, options.seeds))
    text = f"Mean reward of the episodes, {'mean over seeds' if many else 'seed'} {named}.\n\n{table(found)}"
    print(text)
    if options.write:
        before, begin, rest = options.write.read_text(encoding="utf-8").partition(BEGIN)
        _, end, after = rest.partition(END)
        if not begin or not end:
            raise SystemExit(f"{options.write} has no lines `{BEGIN.strip()}` and `{END.strip()}`")
        options.write.write_text(f"{before}{BEGIN}{text}{END}{after}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
