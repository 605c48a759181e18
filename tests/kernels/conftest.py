"""The native library for the tests: the installed one, else built from csrc into build/tests-cpu (kept for the next run)."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from quantkit.kernels import native

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "tests-cpu"
ISAS = ("generic", "avx2", "avx512", "avx512-bf16", "neon")


def cmake_build(folder: Path, target: str, *options: str) -> Path:
    """Configure and build one target; returns the folder. Skips the test where there is no compiler or cmake."""
    if shutil.which("cmake") is None:
        pytest.skip("cmake is not installed, so the native kernels cannot be built")
    if not any(shutil.which(name) for name in (os.environ.get("CXX", "c++"), "g++", "clang++")):
        pytest.skip("no C++ compiler here, so the native kernels cannot be built")
    commands = (
        ["cmake", "-S", str(ROOT), "-B", str(folder), *options],
        ["cmake", "--build", str(folder), "--parallel", "2", "--target", target],
    )
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, f"{' '.join(command)} failed:\n{done.stdout}\n{done.stderr}"
    return folder


@pytest.fixture(scope="session")
def library_path() -> Path:
    paths = native._candidates()
    if paths and native.why_unavailable() is None:
        return paths[0]
    return next(cmake_build(BUILD, "quantkit_cpu").glob("_quantkit_cpu.*"))


@pytest.fixture(scope="session")
def load_isa(library_path: Path, tmp_path_factory: pytest.TempPathFactory):
    """A function isa -> library. Every copy of the file is a library with its own choice of instruction set."""
    loaded = {}

    def load(isa: str):
        if isa not in loaded:
            copy = tmp_path_factory.mktemp(isa or "best") / library_path.name
            shutil.copy(library_path, copy)
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("QUANTKIT_CPU_LIB", str(copy))
                if isa:
                    patch.setenv("QUANTKIT_ISA", isa)
                native.library.cache_clear()
                loaded[isa] = native.library()
                name = loaded[isa].qk_isa().decode()
                loaded[isa].qk_threads()
                native.library.cache_clear()
            if isa and name != isa:
                loaded[isa] = None
        if loaded[isa] is None:
            pytest.skip(f"this CPU and build have no {isa} kernels")
        return loaded[isa]

    return load


@pytest.fixture
def lib(load_isa, monkeypatch: pytest.MonkeyPatch):
    """The library with the best instruction set of this machine, used by quantkit for the time of a test."""
    best = load_isa("")
    monkeypatch.setattr(native, "library", lambda: best)
    return best


@pytest.fixture(params=ISAS)
def each_isa(request: pytest.FixtureRequest, load_isa, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of every instruction set in turn, with its library in use."""
    library = load_isa(request.param)
    monkeypatch.setattr(native, "library", lambda: library)
    return request.param
