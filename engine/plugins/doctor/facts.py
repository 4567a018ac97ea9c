"""Facts about this machine: what the checks of `examine.py` read.

Nothing here raises: what cannot be found out is None, and the check that needs it says so.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

SERVER_HELP_SECONDS = 180.0
"""Time in which SGLang must print its flags; it imports all of itself for that."""


@dataclass(frozen=True)
class Gpu:
    """One GPU that torch sees."""

    name: str
    memory: int
    """Bytes."""
    free: int
    """Bytes."""


@dataclass(frozen=True)
class SGLangInstall:
    """SGLang in the environment of one interpreter."""

    python: str
    version: str | None = None
    error: str | None = None
    """Why it cannot be used; None: it can."""
    flags: frozenset[str] | None = None
    """The arguments of its server; None: not asked for."""


@dataclass(frozen=True)
class MachineFacts:
    """Facts about this machine."""

    system: str = "Linux"
    python: tuple[int, int] = (3, 11)
    cpus: int = 1
    torch: str | None = None
    torch_cuda: str | None = None
    """The CUDA release that torch was built for; None: a CPU build."""
    cudnn: tuple[int, int] | None = None
    gpus: tuple[Gpu, ...] = ()
    cuda_error: str | None = None
    """What torch said when it looked for GPUs."""
    driver: str | None = None
    """Version of NVIDIA's driver; None: there is none."""
    npu: bool = False
    """Whether `torch_npu` is installed."""
    shared_memory: int | None = None
    """Free bytes of /dev/shm; None: there is none."""
    open_files: int | None = None
    """Maximum number of open files of this process."""
    loopback: str | None = None
    """Why no port of 127.0.0.1 can be opened; None: one can."""
    peft: bool = False
    """Whether peft is installed."""

    @classmethod
    def here(cls) -> MachineFacts:
        """Find the facts of this machine. Imports torch."""
        import torch

        gpus: list[Gpu] = []
        problem: str | None = None
        try:
            for index in range(torch.cuda.device_count()):
                free, total = torch.cuda.mem_get_info(index)
                gpus.append(Gpu(torch.cuda.get_device_name(index), total, free))
        except RuntimeError as error:
            problem = str(error).splitlines()[0]
        loopback: str | None = None
        try:
            with socket.socket() as found:
                found.bind(("127.0.0.1", 0))
                found.listen()
        except OSError as error:
            loopback = str(error)
        built = torch.version.cuda is not None
        cudnn = torch.backends.cudnn.version() if built else None  # type: ignore[no-untyped-call]
        return cls(
            system=platform.system(),
            python=sys.version_info[:2],
            cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
            torch=torch.__version__,
            torch_cuda=torch.version.cuda,
            cudnn=None if cudnn is None else cudnn_release(cudnn),
            gpus=tuple(gpus),
            cuda_error=problem,
            driver=_driver(),
            npu=importlib.util.find_spec("torch_npu") is not None,
            shared_memory=shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else None,
            open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            loopback=loopback,
            peft=importlib.util.find_spec("peft") is not None,
        )


def cudnn_release(number: int) -> tuple[int, int]:
    """Major and minor version of cuDNN from torch's number: 91002 is 9.10.2, and 8907, of before 9, is 8.9.7."""
    return (number // 10000, number // 100 % 100) if number >= 10000 else (number // 1000, number // 100 % 10)


def release(text: str) -> tuple[int, ...]:
    """The numbers of a version: `2.9.1+cu128` is (2, 9, 1)."""
    return tuple(int(part) for part in re.findall(r"\d+", text.partition("+")[0])[:3])


def sglang_of(python: str, env: dict[str, str], *, flags: bool) -> SGLangInstall:
    """SGLang in an interpreter's environment.

    Args:
        python: The interpreter.
        env: Variables that the servers get.
        flags: Ask for the arguments of its server. Takes 10 to 60 seconds.
    """
    ask = "from importlib.metadata import version; print(version('sglang'))"
    environment = {**os.environ, **env}
    status, out = _run([python, "-c", ask], environment, 60)
    if status != 0:
        missing = "PackageNotFoundError" in out
        return SGLangInstall(python, error="it is not installed" if missing else last_line(out))
    found = out.split()[-1]
    if not flags:
        return SGLangInstall(python, found)
    status, out = _run([python, "-m", "sglang.launch_server", "--help"], environment, SERVER_HELP_SECONDS)
    if status != 0:
        return SGLangInstall(python, found, error=f"its server does not start: {last_line(out)}")
    return SGLangInstall(python, found, flags=frozenset(re.findall(r"--[a-z0-9][a-z0-9-]*", out)))


def last_line(text: str) -> str:
    """The last line that is not empty: of a traceback, the error."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "it printed nothing")


def _run(command: list[str], env: dict[str, str], seconds: float) -> tuple[int, str]:
    try:
        done = subprocess.run(
            command,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=seconds,
        )
    except OSError as error:
        return 1, str(error)
    except subprocess.TimeoutExpired:
        return 1, f"no answer within {seconds:g} s"
    return done.returncode, done.stdout


def _driver() -> str | None:
    if shutil.which("nvidia-smi") is None:
        return None
    status, out = _run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], dict(os.environ), 30)
    return out.split()[0] if status == 0 and out.split() else None
