"""The filter of system calls, evaluated as the kernel does, for machines that this one is not."""

from __future__ import annotations

import errno
import platform
import struct

import pytest

from engine.plugins.confinement.system_calls import filter_program, refusal

MACHINES = {"x86_64": (0xC000003E, {"read": 0, "clone": 56, "clone3": 435, "prctl": 157, "unshare": 272, "shmget": 29}),
            "aarch64": (0xC00000B7, {"read": 63, "clone": 220, "clone3": 435, "prctl": 167, "unshare": 97, "shmget": 194})}  # fmt: skip
ALLOWED, KILLED = 0x7FFF_0000, 0x8000_0000


def verdict(program: bytes, architecture: int, number: int, *arguments: int) -> int:
    """What the kernel does with a call: interprets the instructions that seccomp knows."""
    data = struct.pack("<IIQ6Q", number, architecture, 0, *arguments, *[0] * (6 - len(arguments)))
    lines, at, value = [*struct.iter_unpack("HBBI", program)], 0, 0
    while True:
        code, if_true, if_false, operand = lines[at]
        at += 1
        if code == 0x06:
            return int(operand)
        if code == 0x20:
            (value,) = struct.unpack_from("<I", data, operand)
            continue
        holds = {0x15: value == operand, 0x35: value >= operand, 0x45: bool(value & operand)}[code]
        at += if_true if holds else if_false


@pytest.mark.parametrize("machine", MACHINES)
def test_the_filter_refuses_namespaces_and_memory_of_nobody(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    program, (architecture, calls) = filter_program(), MACHINES[machine]

    def said(name: str, *arguments: int) -> int:
        return verdict(program, architecture, calls[name], *arguments)

    refused = 0x0005_0000 | errno.EPERM
    assert said("read") == ALLOWED
    assert [said("clone", 1 << bit | 17) for bit in (17, 25, 26, 27, 28, 29, 30)] == [refused] * 7
    assert said("clone", 0x003D_0F00) == ALLOWED  # a thread
    assert said("clone3") == 0x0005_0000 | errno.ENOSYS
    assert said("unshare", 0x1000_0000) == said("shmget") == refused
    assert [said("prctl", 1, 0), said("prctl", 1, 17)] == [refused, refused]
    assert [said("prctl", 1, 9), said("prctl", 38, 1), said("prctl", 15, 0)] == [ALLOWED] * 3
    assert verdict(program, architecture, 0x4000_0000) == 0x0005_0000 | errno.ENOSYS
    assert verdict(program, 0x4000_0003, calls["read"]) == KILLED


def test_other_machines_have_no_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert refusal() == "no filter of system calls for riscv64, only for x86_64, aarch64"
