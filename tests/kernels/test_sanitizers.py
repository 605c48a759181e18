"""The C++ test program under AddressSanitizer and UndefinedBehaviorSanitizer, for every instruction set."""

from __future__ import annotations

import os
import subprocess

import pytest
from conftest import ISAS, ROOT, cmake_build

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def program():
    folder = ROOT / "build" / "tests-cpu-sanitized"
    cmake_build(folder, "quantkit_cpu_test", "-DQUANTKIT_SANITIZE=ON")
    return folder / "quantkit_cpu_test"


@pytest.mark.parametrize("threads", ["1", "3"])
@pytest.mark.parametrize("isa", ISAS)
def test_no_access_outside_the_buffers(program, isa, threads):
    environment = {**os.environ, "QUANTKIT_ISA": isa, "QUANTKIT_THREADS": threads}
    done = subprocess.run([str(program)], capture_output=True, text=True, env=environment)
    if f"{isa} with" not in done.stdout and done.returncode == 0:
        pytest.skip(f"this CPU and build have no {isa} kernels")
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
