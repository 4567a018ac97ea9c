"""Resolves the engine beside other trainers, and its own extras together, without constraints.txt; prints one line for each.

    python scripts/check_resolution.py            # newest versions, by `uv pip compile`; about two minutes
    python scripts/check_resolution.py areal      # only the sets whose names contain a word

uv is taken from the path, or installed into an environment of its own in the cache folder. The exit status is 1 if a set conflicts and is not in
`CONFLICTS`. Nothing but uv is installed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DEADLINE_S = 300
SHOWN = (
    "trl",
    "verl",
    "skyrl",
    "areal",
    "sglang",
    "vllm",
    "torch",
    "transformers",
    "math-verify",
    "datasets",
    "fsspec",
    "s3fs",
)
ALONE = ("adapters", "areal", "sglang")
"""Extras that are resolved apart from the others: they pin other versions of transformers or of mcp, or bring a server."""
CONFLICTS = {
    "skyrl[fsdp]": "flashinfer-jit-cache is not on PyPI in the version that SkyRL pins",
    "areal[cuda]": "its pin of nvidia-cudnn-cu12 is not the one of the torch that its SGLang needs",
}
"""Sets that conflict without the engine too, and why."""


def sets() -> dict[str, list[str]]:
    """The requirements to resolve together, by the name of the set."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]

    def engine(*names: str) -> str:
        return f"episode-engine[{','.join(names)}] @ {ROOT.as_uri()}"

    return {
        **{name: [engine(), name] for name in ("trl", "verl", "skyrl", "areal", "trl[vllm]", "verl[vllm]")},
        "skyrl[fsdp]": [engine(), "skyrl[fsdp]>=0.3"],
        "areal[cuda]": [engine(), "areal[cuda]>=1.0.4"],
        "dev with all extras but " + ", ".join(ALONE): [engine(*(name for name in extras if name not in ALONE))],
        "dev,ray,s3,train with moto": [engine("dev", "ray", "s3", "train"), "moto[server]"],
        **{f"dev,train,{name}": [engine("dev", "train", name)] for name in ALONE if name != "sglang"},
        "sglang": [engine("sglang")],
    }


def find_uv() -> str:
    """The path of uv, which is installed first if it is not on the path."""
    if found := shutil.which("uv"):
        return found
    cache = Path(os.environ.get("EPISODE_ENGINE_CACHE") or Path.home() / ".cache" / "episode-engine")
    folder = Path(os.environ.get("TRAINER_ENVS") or cache / "trainer-envs") / "uv"
    if not (folder / "bin" / "uv").exists():
        venv.create(folder, with_pip=True)
        subprocess.run([folder / "bin" / "pip", "install", "--quiet", "uv"], check=True)
    return str(folder / "bin" / "uv")


def resolve(uv: str, requirements: list[str]) -> tuple[bool, str]:
    """Return whether the requirements have a common solution, with its versions or with uv's reason."""
    words = [uv, "pip", "compile", "--quiet", "--no-header", "--no-annotate", "--color", "never", "-"]
    try:
        done = subprocess.run(
            [*words, "--python-version", "3.11"],
            input="\n".join(requirements),
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False, f"no answer within {DEADLINE_S} s"
    if done.returncode != 0:
        return False, " ".join(done.stderr.split())
    found = dict(re.findall(r"^([\w.-]+)==(\S+)", done.stdout, re.MULTILINE))
    return True, ", ".join(f"{name} {found[name]}" for name in SHOWN if name in found)


def main() -> None:
    uv, words, failed = find_uv(), sys.argv[1:], []
    for name, requirements in sets().items():
        if words and not any(word in name for word in words):
            continue
        solved, said = resolve(uv, requirements)
        state = "resolves" if solved else "known conflict" if name in CONFLICTS else "CONFLICT"
        said = CONFLICTS[name] if state == "known conflict" else said
        sys.stdout.write(f"{name:60}  {state:14}  {said}\n")
        sys.stdout.flush()
        if state == "CONFLICT":
            failed.append(name)
    if failed:
        sys.exit(f"these do not resolve: {'; '.join(failed)}")


if __name__ == "__main__":
    main()
