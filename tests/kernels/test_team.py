"""The team of threads: any size, pinned or not, and after fork(). In processes of their own, as all is set once."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import os, torch
from weights import random_weight, check
from quantkit.kernels import native
from quantkit.kernels.linear import Request, cpu
from quantkit.scheme import Scheme
torch.set_num_threads(1)  # GNU OpenMP, which PyTorch uses, does hang in a forked child
allowed = os.sched_getaffinity(0)
weight = random_weight(Scheme(4, True, 32), 200, 96)
request = Request.of(weight, dtype=torch.float32)
x = torch.randn(5, 96)
run = lambda: check(cpu.prepare(weight, None, request)(x), x, weight, None, request, "team")
run()
assert native.library().qk_threads() == int(os.environ["QUANTKIT_THREADS"])
assert os.sched_getaffinity(0) == allowed, "the caller stayed pinned"
child = os.fork()
if child == 0:
    run()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0, "the forked child failed"
run()
"""


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="affinity masks are a Linux notion")
@pytest.mark.parametrize(("threads", "pin"), [("1", "1"), ("2", "1"), ("5", "0")])
def test_sizes_pinning_and_fork(library_path, threads, pin):
    here = os.path.dirname(__file__)
    environment = {
        **os.environ,
        "QUANTKIT_CPU_LIB": str(library_path),
        "QUANTKIT_THREADS": threads,
        "QUANTKIT_PIN": pin,
        "PYTHONPATH": os.pathsep.join([here, *sys.path]),
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
