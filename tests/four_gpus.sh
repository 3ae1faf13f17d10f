#!/usr/bin/env bash
# What takes four GPUs, on one machine:
#
#   tests/four_gpus.sh FOLDER [PROGRAMS]
#
# Exactness at EP = ETP = 2, ETP = 4, EP = 4 and TP = 4, as threads and as processes; the main job's
# losses against the CPU's; the bench beside PyTorch on 1, 2 and 4 GPUs; a process that is killed.
# Output goes to FOLDER. PROGRAMS is a folder with the programs, for a machine without Rust; they
# get there, with or without GPUs, by
#
#   tests/four_gpus.sh --build PROGRAMS
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)

# The path of the one program that cargo has built.
executable() {
    (cd "$root" && CARGO_TERM_COLOR=never cargo "$@" --locked --no-run 2>&1) |
        tee /dev/stderr | sed -n 's/^ *Executable .*(\(.*\))$/\1/p' | tail -n 1
}

build() {
    local tests finetune bench into
    mkdir -p "$1"
    into=$(realpath "$1")
    tests=$(executable test -p moe-lora-tests --features gpu --release --test gpu)
    finetune=$(executable test -p finetune --features cuda --release --test gpu)
    bench=$(executable bench -p moe-lora-benches --features gpu --bench gpu)
    cd "$root"
    cp "$tests" "$into/tests"
    cp "$finetune" "$into/finetune"
    cp "$bench" "$into/bench"
}

if [ "${1:-}" = --build ]; then
    build "${2:?names no folder for the programs}"
    exit
fi

output=${1:?names no folder for the output}
found=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ' || true)
if [ "$found" -lt 4 ]; then
    echo "needs 4 GPUs, found $found" >&2
    exit 1
fi
export MOE_LORA_REQUIRE_GPUS=4
mkdir -p "$output"
folder=$(realpath "$output")
programs=$(realpath "${2:-$folder/programs}")
if [ $# -lt 2 ]; then
    build "$programs"
fi
# Programs that were built elsewhere read the example's assets from here.
cd "$root"
# shellcheck source=../benches/libraries.sh
. "$root/benches/libraries.sh" "$folder/lib"

failed=()
part() {
    local name=$1
    shift
    echo "== $name"
    "$@" >"$folder/$name.txt" 2>&1 || failed+=("$name")
    tail -n 30 "$folder/$name.txt"
}

suite() {
    "$programs/$1" --test-threads 1 --nocapture "${@:2}"
}

part exactness suite tests four:: --skip killed
part finetune suite finetune of_four_gpus
for ranks in "1 1" "1 2" "1 4" "2 2"; do
    read -r ep etp <<<"$ranks"
    SIDES='times pytorch' part "bench-ep$ep-etp$etp" \
        "$root/benches/gpu.sh" "$programs/bench" "$folder/ep$ep-etp$etp" --ep "$ep" --etp "$etp"
done
part scaling python3 "$root/benches/scaling.py" "$folder"/ep1-etp*/{times,pytorch}.jsonl
part killed suite tests four:: --skip exact

if [ ${#failed[@]} -gt 0 ]; then
    echo "failed: ${failed[*]}" >&2
    exit 1
fi
echo "all parts passed"
