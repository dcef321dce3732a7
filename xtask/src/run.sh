#!/bin/sh
# Runs on a GPU machine as it is: the cases on the GPU, memcheck and synccheck, the GPU's bytes of the conformance kernels, the benchmarks.
# Builds nothing. Leaves one file: results.tgz beside this script, or where the first argument says. Further arguments
# choose steps: `./run.sh results.tgz cases bytes`.
here=$(cd "$(dirname "$0")" && pwd)
archive=${1:-$here/results.tgz}
[ $# -eq 0 ] || shift
chosen=" $* "
results=$(mktemp -d) || exit 1
trap 'rm -rf "$results"' EXIT
log=$results/log.txt
export OXTILE_KERNELS="$here/kernels" OXTILE_PEERS="$here" OXTILE_REQUIRE=cuda
OXTILE_COMMIT=$(cat "$here/commit")
export OXTILE_COMMIT
# Where a toolkit keeps cuBLASLt, which one path of the quantized products takes.
[ ! -d /usr/local/cuda/lib64 ] || export LD_LIBRARY_PATH="/usr/local/cuda/lib64${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
cd "$here" || exit 1
# Programs come to lie beside this script.
[ -x oxtile-tests ] || tar -xJf programs.txz --strip-components=1 || exit 1
[ -d kernels ] || tar -xJf kernels.txz || exit 1
failures=0

# Where PyPI's packages keep a library that the loader does not know: `of_pypi nccl/lib/libnccl.so.2`. Nothing where it knows it, or there is none.
of_pypi() {
    python3 -c 'import ctypes, sys; ctypes.CDLL(sys.argv[1])' "${1##*/}" 2>/dev/null && return
    python3 -c 'import os, sys; print(*[f for d in sys.path if os.path.isfile(f := f"{d}/nvidia/{sys.argv[1]}")][:1])' "$1"
}

# step NAME COMMAND...: its output goes to the log, framed by its name, status and time; the frame to the terminal too.
step() {
    name=$1
    shift
    case "$chosen" in "  " | *" $name "*) ;; *) return ;; esac
    printf '==== %s: %s\n' "$name" "$*" | tee -a "$log"
    start=$(date +%s)
    "$@" >>"$log" 2>&1
    status=$?
    if [ "$status" -ne 0 ]; then
        failures=$((failures + 1))
        tail -n 20 "$log"
    fi
    printf '==== %s: status %s, %s s\n\n' "$name" "$status" "$(($(date +%s) - start))" | tee -a "$log"
    # After every step: a run that is cut short leaves what it had.
    tar -czf "$archive" -C "$results" .
}

step machine nvidia-smi --query-gpu=name,driver_version,power.limit,memory.total --format=csv
step cases ./oxtile-tests cuda::
# Of packs too, which a folder that is named would hide; the one beside the programs is found after them.
step runtime env -u OXTILE_KERNELS ./runtime-tests
if [ -z "${OXTILE_NCCL:-}" ]; then
    found=$(of_pypi nccl/lib/libnccl.so.2)
    [ -z "$found" ] || export OXTILE_NCCL="$found"
fi
step nccl ./nccl-tests
# Tests of more GPUs than there are fail where they are required.
gpus=$(nvidia-smi -L | wc -l)
few=""
[ "$gpus" -ge 4 ] || few="--skip gpu::hosts --skip exchange::program::2 --skip exchange::program::4 --skip exchange::silence"
# shellcheck disable=SC2086
step vmm env OXTILE_REQUIRE=vmm ./vmm-tests --skip gpu::deaths --skip nvshmem:: $few
# Its ranks have a GPU each.
if [ "$gpus" -ge 2 ]; then
    if [ -z "${OXTILE_NVSHMEM:-}" ]; then
        found=$(of_pypi nvshmem/lib/libnvshmem_host.so.3)
        [ -z "$found" ] || export OXTILE_NVSHMEM="$found"
    fi
    few=""
    [ "$gpus" -ge 4 ] || few="--skip nvshmem::process::4"
    # shellcheck disable=SC2086
    step nvshmem env OXTILE_REQUIRE=nvshmem ./vmm-tests nvshmem:: $few
fi
step bytes env OXTILE_GOLDEN_OUT="$results/conformance.txt" ./oxtile-tests cuda::small::conformance
if command -v compute-sanitizer >/dev/null 2>&1; then
    for tool in memcheck synccheck; do
        step "$tool" compute-sanitizer --tool "$tool" --error-exitcode 9 ./oxtile-tests --test-threads 1 cuda::small
    done
else
    printf '==== memcheck, synccheck: NOT RUN, there is no compute-sanitizer in PATH\n\n' | tee -a "$log"
    failures=$((failures + 1))
fi
step benches ./oxtile-benches --json "$results/benches"
# About a minute: a sweep measures no further shape after that.
step sweep ./oxtile-benches attention --sweep --json "$results/benches"
# Two to three minutes: ranks that die, one case at a time. Only where it is named.
[ "$chosen" = "  " ] || step deaths env OXTILE_REQUIRE=vmm OXTILE_TEST_ALONE=1 ./vmm-tests gpu::deaths --test-threads 1
printf '==== %s step(s) failed\n' "$failures" | tee -a "$log"
tar -czf "$archive" -C "$results" . || exit 1
printf '%s\n' "$archive"
[ "$failures" -eq 0 ]
