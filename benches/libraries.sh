#!/usr/bin/env bash
# Sourced with a folder: NCCL and NVRTC for the programs that follow, on a machine that has them in
# PyTorch's wheels alone.
#
#   . benches/libraries.sh FOLDER

# NCCL's use of NVLink multicast can put the GPUs of a shared host out of service.
export NCCL_NVLS_ENABLE=0

# A library that the loader does not find is taken from PyTorch's wheels. They have it under its
# version alone, and it is loaded as lib*.so: hence the link in the folder.
provide() {
    if ldconfig -p | grep "^[[:space:]]*$2 " >/dev/null; then
        return
    fi
    local wheels found
    wheels=$(python3 -c 'import nvidia; print(*nvidia.__path__)' || true)
    # shellcheck disable=SC2086
    found=${wheels:+$(find $wheels -name "$2*" -print -quit)}
    if [ -z "$found" ]; then
        echo "$2 is neither installed nor in PyTorch's wheels" >&2
        return
    fi
    ln -sf "$found" "$1/$2"
    LD_LIBRARY_PATH=$1:$(dirname "$found")${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
}
mkdir -p "$1"
provide "$(realpath "$1")" libnccl.so
provide "$(realpath "$1")" libnvrtc.so
export LD_LIBRARY_PATH=${LD_LIBRARY_PATH:-}
