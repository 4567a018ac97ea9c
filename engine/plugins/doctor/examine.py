"""The checks of `engine doctor`: facts of a machine against what a spec asks for.

Each check is a function of the machine and the spec, and yields what it found. To add one: a function, and its entry in
`CHECKS`.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from engine.plugins.doctor.facts import MachineFacts, SGLangInstall, last_line, release, sglang_of
from engine.validate.train import FLOAT32_ON_GPU

if TYPE_CHECKING:
    from engine.schemas.backend import LaunchSpec
    from engine.spec.load import LoadedSpec

Level = Literal["ok", "warning", "error"]
GIB = 1024**3
MINIMUM_SGLANG = (0, 5, 23)
"""The first release that says which prompt it computed on."""
FILES_PER_EPISODE = 4
"""Connections and files of one running episode, at most."""


class CheckResult(NamedTuple):
    """What one check found."""

    level: Level
    about: str
    text: str
    fix: str = ""
    """What to install or change; empty for `ok`."""


@dataclass(frozen=True)
class Examined:
    """What is examined."""

    machine: MachineFacts
    loaded: LoadedSpec | None = None
    sglang: SGLangInstall | None = None
    """SGLang in the environment that servers are started in; None: nothing starts servers."""
    model_bytes: int | None = None
    """Size of the model's weight files; None: they are not on this machine yet."""

    @property
    def backend(self) -> Any:
        """The backend of the spec; None without a spec."""
        return None if self.loaded is None else self.loaded.spec.backend

    @property
    def launch(self) -> LaunchSpec | None:
        """The servers that the spec starts; None if it starts none."""
        launch: LaunchSpec | None = getattr(self.backend, "launch", None)
        return launch


def examine(loaded: LoadedSpec | None) -> list[CheckResult]:
    """Find the facts of this machine, and check them. Takes up to a minute where SGLang is asked for its flags.

    Args:
        loaded: The spec to run; None: only the machine is examined.
    """
    launch = getattr(loaded.spec.backend, "launch", None) if loaded is not None else None
    served = loaded is not None and loaded.spec.backend.kind_name() == "sglang"
    sglang = None
    if loaded is None or (served and launch is not None):
        python = launch.python or sys.executable if launch is not None else sys.executable
        sglang = sglang_of(python, launch.env if launch is not None else {}, flags=launch is not None)
    machine = MachineFacts.here()
    return check(Examined(machine, loaded, sglang, None if loaded is None else _model_bytes(loaded)))


def check(examined: Examined) -> list[CheckResult]:
    """The results of every check, in the order of `CHECKS`."""
    return [result for function in CHECKS for result in function(examined)]


def system(examined: Examined) -> Iterator[CheckResult]:
    """Operating system and Python."""
    machine = examined.machine
    name = f"{machine.system}, Python {machine.python[0]}.{machine.python[1]}, {machine.cpus} CPU cores"
    yield CheckResult("ok", "system", name)
    if machine.npu:
        yield CheckResult(
            "warning",
            "NPU",
            "torch_npu is installed, and NPUs are not supported",
            "use NVIDIA GPUs, or a CPU for small models",
        )
    launch = examined.launch
    if launch is not None and machine.system != "Linux":
        yield CheckResult(
            "error",
            "system",
            f"`backend.launch` starts servers on Linux, not on {machine.system}",
            "start servers elsewhere, and name them in `backend.urls`",
        )


def torch_build(examined: Examined) -> Iterator[CheckResult]:
    """Torch, CUDA, driver and cuDNN."""
    machine = examined.machine
    if machine.torch is None:
        yield CheckResult("error", "torch", "torch is not installed", "pip install torch")
        return
    build = "CPU build" if machine.torch_cuda is None else f"CUDA {machine.torch_cuda}"
    yield CheckResult("ok", "torch", f"{machine.torch}, {build}")
    if machine.torch_cuda is None and machine.driver is not None:
        yield CheckResult(
            "warning",
            "CUDA",
            f"there is an NVIDIA driver ({machine.driver}), and torch is a CPU build, which uses no GPU",
            "install a CUDA build of torch: see https://pytorch.org/get-started/locally",
        )
    if machine.torch_cuda is not None and not machine.gpus:
        why = machine.cuda_error or (
            "there is no NVIDIA driver" if machine.driver is None else f"driver {machine.driver}"
        )
        yield CheckResult(
            "warning", "CUDA", f"torch finds no GPU: {why}", "check `nvidia-smi` and CUDA_VISIBLE_DEVICES"
        )
    slow = release(machine.torch)[:2] == (2, 9) and machine.cudnn is not None and machine.cudnn < (9, 16)
    if slow and machine.cudnn is not None:
        yield CheckResult(
            "warning",
            "cuDNN",
            f"torch 2.9 with cuDNN {machine.cudnn[0]}.{machine.cudnn[1]}: conv3d, with which vision models embed "
            "images, is many times slower",
            "pip install 'nvidia-cudnn-cu12>=9.16'",
        )


def gpus(examined: Examined) -> Iterator[CheckResult]:
    """GPUs: those that are there, and those that `backend.launch` names."""
    present = examined.machine.gpus
    for index, gpu in enumerate(present):
        text = f"GPU {index}: {gpu.name}, {gpu.memory / GIB:.0f} GiB, {gpu.free / GIB:.0f} free"
        if gpu.free < gpu.memory / 2:
            yield CheckResult("warning", "GPU", text, "another process uses it: see `nvidia-smi`")
        else:
            yield CheckResult("ok", "GPU", text)
    if not present:
        yield CheckResult("ok", "GPU", "none: small models run on the CPU")
    launch = examined.launch
    last = -1 if launch is None else max(launch.indexes, default=-1)
    if last >= len(present):
        yield CheckResult(
            "error",
            "GPU",
            f"`backend.launch.gpus` names GPU {last}, and torch finds {len(present)}",
            "name GPUs of this machine; their indexes begin at 0",
        )
    if launch is not None and examined.model_bytes is not None and present:
        smallest = min((present[index].memory for index in launch.indexes if index < len(present)), default=0)
        if smallest and examined.model_bytes > 0.9 * smallest * launch.tp:
            yield CheckResult(
                "error",
                "GPU",
                f"the weights take {examined.model_bytes / GIB:.0f} GiB, and {launch.tp} GPU of a server have "
                f"{smallest * launch.tp / GIB:.0f}",
                "raise `backend.launch.tp`",
            )


def servers(examined: Examined) -> Iterator[CheckResult]:
    """SGLang in the environment that servers are started in: its version and its flags."""
    sglang, launch = examined.sglang, examined.launch
    if sglang is None:
        return
    place = "" if launch is None or launch.python is None else f" in the environment of {sglang.python}"
    install = f"{sglang.python} -m pip install 'sglang>={'.'.join(map(str, MINIMUM_SGLANG))}'"
    if sglang.error is not None:
        level: Level = "error" if launch is not None else "ok"
        fix = (
            f"{install}, or name the interpreter of its environment in `backend.launch.python`"
            if launch is not None
            else ""
        )
        yield CheckResult(level, "SGLang", f"not usable{place}: {sglang.error}", fix)
        return
    if release(sglang.version or "") < MINIMUM_SGLANG:
        yield CheckResult(
            "error", "SGLang", f"{sglang.version}{place}: it does not say which prompt it computed on", install
        )
        return
    yield CheckResult("ok", "SGLang", f"{sglang.version}{place}")
    if launch is None or sglang.flags is None:
        return
    for argument in launch.args:
        name = argument.partition("=")[0]
        if name.startswith("--") and name not in sglang.flags:
            near = get_close_matches(name, sorted(sglang.flags), 1)
            advice = f"did you mean `{near[0]}`? " if near else ""
            yield CheckResult(
                "error",
                "SGLang",
                f"its server has no argument `{name}` of `backend.launch.args`",
                f"{advice}{sglang.python} -m sglang.launch_server --help lists all",
            )


def urls(examined: Examined) -> Iterator[CheckResult]:
    """The servers of `backend.urls`: whether they answer, and with which version."""
    import httpx

    backend = examined.backend
    if backend is None or backend.kind_name() != "sglang" or backend.launch is not None:
        return
    for url in backend.urls:
        try:
            reply = httpx.get(f"{url.rstrip('/')}/server_info", timeout=10)
        except httpx.HTTPError as error:
            yield CheckResult(
                "error",
                "server",
                f"{url} does not answer: {last_line(str(error))}",
                "start it, or correct `backend.urls`",
            )
            continue
        info = reply.json() if reply.status_code == 200 else {}
        version = str(info.get("version", ""))
        if reply.status_code == 401:
            yield CheckResult("ok", "server", f"{url} answers, and asks for a key")
        elif reply.status_code != 200 or not version:
            yield CheckResult(
                "error",
                "server",
                f"{url} answers {reply.status_code}; it is not an SGLang server",
                "correct `backend.urls`",
            )
        elif release(version) < MINIMUM_SGLANG:
            yield CheckResult(
                "error",
                "server",
                f"{url} runs SGLang {version}: it does not say which prompt it computed on",
                "update it to 0.5.23",
            )
        else:
            yield CheckResult("ok", "server", f"{url} runs SGLang {version}")


def ports(examined: Examined) -> Iterator[CheckResult]:
    """Ports of this machine."""
    if examined.machine.loopback is not None:
        yield CheckResult(
            "error",
            "ports",
            f"no port of 127.0.0.1 can be opened: {examined.machine.loopback}",
            "check the sandbox or container",
        )
    else:
        yield CheckResult("ok", "ports", "ports of 127.0.0.1 can be opened")


def open_files(examined: Examined) -> Iterator[CheckResult]:
    """The limit on open files, against the episodes that run at once."""
    most = examined.machine.open_files
    if most is None or examined.loaded is None:
        return
    rollout = examined.loaded.spec.rollout
    needed = 256 + FILES_PER_EPISODE * (rollout.live_episodes or 2 * rollout.concurrency)
    if most < needed:
        yield CheckResult(
            "warning",
            "open files",
            f"at most {most}; {needed} may be needed for the episodes that run at once",
            f"ulimit -n {max(4096, needed)}",
        )
    else:
        yield CheckResult("ok", "open files", f"at most {most}")


def shared_memory(examined: Examined) -> Iterator[CheckResult]:
    """/dev/shm: NCCL, and weights that are sent as tensors, use it. Containers often have 64 MB."""
    free = examined.machine.shared_memory
    if free is None:
        return
    train = examined.loaded.spec.train if examined.loaded is not None else None
    launch = examined.launch
    several = launch is not None and launch.tp > 1
    tensors = train is not None and train.weight_sync.method == "tensors"
    text = f"{free / GIB:.2g} GiB free"
    if free < GIB and (several or tensors):
        what = "servers of several GPUs" if several else "`train.weight_sync.method: tensors`"
        yield CheckResult(
            "error",
            "shared memory",
            f"{text}; {what} need 1 GiB and more",
            "start the container with --shm-size=16g (or --ipc=host)",
        )
    elif free < GIB:
        yield CheckResult("warning", "shared memory", text, "start the container with --shm-size=16g (or --ipc=host)")
    else:
        yield CheckResult("ok", "shared memory", text)


def disk(examined: Examined) -> Iterator[CheckResult]:
    """Free disk space where runs are stored, against the checkpoints that are kept."""
    out = Path(examined.loaded.spec.rollout.out) if examined.loaded is not None else Path("runs")
    place = out.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    text = f"{free / GIB:.1f} GiB free for {out}"
    if not os.access(place, os.W_OK):
        yield CheckResult(
            "error", "disk", f"{place} cannot be written", "choose another folder: `rollout.out`, or `--out`"
        )
        return
    train = examined.loaded.spec.train if examined.loaded is not None else None
    if train is not None and examined.model_bytes is not None and train.adapter is None:
        # float32 weights and two moments; the newest ones, the best one, and the one that is being written
        needed = 6 * examined.model_bytes * (train.checkpoints.keep + 2)
        if free < needed:
            yield CheckResult(
                "error",
                "disk",
                f"{text}; {train.checkpoints.keep + 2} checkpoints take about {needed / GIB:.0f}",
                "use a larger disk (`--out`), keep fewer (`train.checkpoints.keep`), or train an adapter "
                "(`train.lora`)",
            )
            return
    if free < 2 * GIB:
        yield CheckResult("warning", "disk", text, "free some space: a run stores every token")
    else:
        yield CheckResult("ok", "disk", text)


def packages(examined: Examined) -> Iterator[CheckResult]:
    """Packages that a spec needs."""
    if examined.loaded is None or examined.loaded.spec.train is None:
        return
    if examined.loaded.spec.train.adapter is not None and not examined.machine.peft:
        yield CheckResult("error", "packages", "`train.lora` needs peft", "pip install 'peft>=0.17'")


def precision(examined: Examined) -> Iterator[CheckResult]:
    """The precision of a training on the device that it gets here."""
    train = None if examined.loaded is None else examined.loaded.spec.train
    if train is None:
        return
    device = train.device.partition(":")[0]
    if device == "auto":
        device = "cuda" if examined.machine.gpus else "cpu"
    name = train.precision_on(device)
    if device == "cuda" and name == "float32":
        yield CheckResult("warning", "precision", FLOAT32_ON_GPU, "remove `train.precision: float32`, or write `mixed`")
    else:
        yield CheckResult(
            "ok", "precision", f"the training computes in {name} on {device} (`train.precision: {train.precision}`)"
        )


CHECKS: tuple[Callable[[Examined], Iterator[CheckResult]], ...] = (
    system,
    torch_build,
    gpus,
    servers,
    urls,
    ports,
    open_files,
    shared_memory,
    disk,
    packages,
    precision,
)
"""Every check, in the order in which findings are printed."""


def _model_bytes(loaded: LoadedSpec) -> int | None:
    """Size of the weight files of a model that is on this machine. Nothing is downloaded."""
    from engine.validate.model_files import model_files

    files = model_files(loaded)
    if files is None:
        return None
    weights = [path for ending in ("safetensors", "gguf", "bin") for path in files.folder.glob(f"*.{ending}")]
    return sum(path.stat().st_size for path in weights) or None
