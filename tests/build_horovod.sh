#!/usr/bin/env bash
# Builds Horovod 0.28.1, its last release, for the torch of the `pip` in PATH, and installs it: build_horovod.sh FOLDER
# keeps the wheel in a part of FOLDER for that torch and Python.
set -euo pipefail
folder=$1/$(python -c 'import sys, torch; print(f"torch-{torch.__version__}-{sys.implementation.cache_tag}")')
if ! ls "$folder"/*.whl 2>/dev/null; then
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    pip download --no-deps --no-binary horovod --no-build-isolation --dest "$work" horovod==0.28.1
    tar -xzf "$work"/horovod-0.28.1.tar.gz -C "$work"
    # Torch's headers need C++17, and gloo's in the same library must be compiled alike. Horovod's master has it so.
    sed -i 's/CMAKE_CXX_STANDARD 14/CMAKE_CXX_STANDARD 17/' "$work"/horovod-0.28.1/{CMakeLists.txt,horovod/torch/CMakeLists.txt}
    # CMake 4 refuses gloo, which asks for a CMake of 2.8, without it.
    export CMAKE_POLICY_VERSION_MINIMUM=3.5
    export HOROVOD_WITH_PYTORCH=1 HOROVOD_WITH_GLOO=1 HOROVOD_CPU_OPERATIONS=GLOO
    export HOROVOD_WITHOUT_MPI=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1
    MAKEFLAGS=-j$(nproc) pip wheel --no-deps --no-build-isolation --wheel-dir "$folder" "$work"/horovod-0.28.1
fi
pip install --no-deps --force-reinstall "$folder"/*.whl
