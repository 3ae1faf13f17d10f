#!/usr/bin/env bash
# Both sides on one machine with two GPUs, one after the other:
#
#   benches/gpu.sh BINARY FOLDER [FLAGS FOR THE BINARY AND FOR pytorch.py]
#
# BINARY is the bench `gpu`, built elsewhere with
#   cargo bench -p moe-lora-benches --features gpu --bench gpu --no-run
# Tables and JSON lines go to FOLDER. Flags that both take: --calls, --windows, --inputs.
set -euo pipefail
binary=$(realpath "$1") folder=$2
shift 2
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$folder/lib"
folder=$(realpath "$folder")

# NCCL's use of NVLink multicast can put the GPUs of a shared host out of service.
export NCCL_NVLS_ENABLE=0

# A library that the loader does not find is taken from PyTorch's wheels. They have it under its
# version alone, and it is loaded as lib*.so: hence the link.
provide() {
    if ldconfig -p | grep "^[[:space:]]*$1 " >/dev/null; then
        return
    fi
    local wheels found
    wheels=$(python3 -c 'import nvidia; print(*nvidia.__path__)' || true)
    # shellcheck disable=SC2086
    found=${wheels:+$(find $wheels -name "$1*" -print -quit)}
    if [ -z "$found" ]; then
        echo "$1 is neither installed nor in PyTorch's wheels" >&2
        return
    fi
    ln -sf "$found" "$folder/lib/$1"
    LD_LIBRARY_PATH=$folder/lib:$(dirname "$found")${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
}
provide libnccl.so
provide libnvrtc.so
export LD_LIBRARY_PATH=${LD_LIBRARY_PATH:-}

nvidia-smi --query-gpu=name,driver_version,clocks.sm,clocks.mem --format=csv | tee "$folder/gpus.txt"

failed=0
side() {
    local name=$1
    shift
    echo "== $name"
    "$@" --out "$folder/$name.jsonl" 2>"$folder/$name.err" | tee "$folder/$name.txt" || failed=1
    tail -n 20 "$folder/$name.err" >&2
}
# The processes' times on both sides of PyTorch's: they differ by what the machine does meanwhile.
side times "$binary" times "$@"
side pytorch python3 "$here/pytorch.py" "$@"
side times-again "$binary" times "$@"
side threads "$binary" times --threads "$@"
side kernels "$binary" kernels
side collectives "$binary" collectives "$@"
side counts "$binary" counts
exit "$failed"
