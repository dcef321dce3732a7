#!/bin/sh
# Runs on a GPU machine as it is: the tests on both back ends, memcheck over them, the benchmarks.
# Builds nothing. Leaves one file, results.txt, beside this script or where the first argument says.
here=$(cd "$(dirname "$0")" && pwd)
results=${1:-$here/results.txt}
export OXTILE_KERNELS="$here/kernels" OXTILE_PEERS="$here" OXTILE_REQUIRE=cuda
cd "$here" || exit 1
: >"$results" || exit 1
failures=0

# step NAME COMMAND...: its output goes to the results, framed by its name, status and time.
step() {
    name=$1
    shift
    printf '==== %s: %s\n' "$name" "$*" | tee -a "$results"
    start=$(date +%s)
    "$@" >>"$results" 2>&1
    status=$?
    [ "$status" -eq 0 ] || failures=$((failures + 1))
    printf '==== %s: status %s, %s s\n\n' "$name" "$status" "$(($(date +%s) - start))" | tee -a "$results"
}

step machine nvidia-smi --query-gpu=name,driver_version,power.limit,memory.total --format=csv
step tests ./oxtile-tests
if command -v compute-sanitizer >/dev/null 2>&1; then
    step memcheck compute-sanitizer --tool memcheck --error-exitcode 9 ./oxtile-tests cuda
else
    printf '==== memcheck: NOT RUN, there is no compute-sanitizer in PATH\n\n' | tee -a "$results"
    failures=$((failures + 1))
fi
step benches ./oxtile-benches
printf '==== %s step(s) failed\n' "$failures" | tee -a "$results"
[ "$failures" -eq 0 ]
