#!/usr/bin/env bash
# Both sides on one machine with two GPUs, one after the other:
#
#   benches/gpu.sh BINARY FOLDER [FLAGS FOR THE BINARY AND FOR pytorch.py]
#
# BINARY is the bench `gpu`, built elsewhere with
#   cargo bench -p moe-lora-benches --features gpu --bench gpu --no-run
# Tables and JSON lines go to FOLDER. Flags that both take: --ep, --etp (as many GPUs as their
# product), --calls, --windows, --inputs. SIDES names some of the parts in place of all.
set -euo pipefail
binary=$(realpath "$1") folder=$2
shift 2
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$folder"
folder=$(realpath "$folder")
# shellcheck source=libraries.sh
. "$here/libraries.sh" "$folder/lib"

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
for part in ${SIDES:-times pytorch times-again threads variants kernels collectives counts}; do
    case $part in
    times-again) side "$part" "$binary" times "$@" ;;
    threads) side "$part" "$binary" times --threads "$@" ;;
    pytorch) side "$part" python3 "$here/pytorch.py" "$@" ;;
    *) side "$part" "$binary" "$part" "$@" ;;
    esac
done
exit "$failed"
