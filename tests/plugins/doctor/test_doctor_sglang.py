"""`engine doctor` reads a real installation of SGLang."""

from __future__ import annotations

import pytest
from sglang_interpreter import SCRIPT, sglang_python

from engine.plugins.doctor.examine import MINIMUM_SGLANG
from engine.plugins.doctor.facts import release, sglang_of


@pytest.mark.sglang
def test_doctor_reads_the_arguments_of_the_real_server() -> None:
    stand_ins = SCRIPT.with_suffix("")
    environment = {"PYTHONPATH": str(stand_ins), "SGLANG_USE_CPU_ENGINE": "1"}
    found = sglang_of(str(sglang_python()), environment, flags=True)
    assert found.error is None
    assert release(found.version or "") >= MINIMUM_SGLANG
    assert found.flags is not None
    assert found.flags >= {
        "--model-path",
        "--tp-size",
        "--enable-lora",
        "--mem-fraction-static",
        "--enable-memory-saver",
    }
