"""Peak memory of a quantization above the interpreter's own footprint. Prints one JSON row.

python results/peak_memory.py MODEL OUT [quantize options]
"""

import json
import subprocess
import sys

IMPORTS = (
    "import torch, transformers, rich, quantkit.quantize, quantkit.commands._quantize_ui, quantkit.calib; "
)
IMPORTS += "from transformers import AutoModelForCausalLM, AutoTokenizer"


def peak(command: list[str]) -> int:
    """Largest resident set in bytes of a command, children of other commands excluded (one process each)."""
    code = (
        "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL); "
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)"
    )
    done = subprocess.run([sys.executable, "-c", code, *command], check=True, capture_output=True, text=True)
    return int(done.stdout.split()[-1])


if __name__ == "__main__":
    model, out, *options = sys.argv[1:]
    base = peak([sys.executable, "-c", IMPORTS])
    whole = peak(
        [
            sys.executable,
            "-m",
            "quantkit.cli",
            "quantize",
            model,
            "-o",
            out,
            "--overwrite",
            "--restart",
            *options,
        ]
    )
    row = {
        "metric": "peak_memory_above_interpreter",
        "value": whole - base,
        "unit": "bytes",
        "interpreter": base,
        "peak": whole,
    }
    print(json.dumps(row))
