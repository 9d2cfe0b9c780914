#!/usr/bin/env bash
# compute-sanitizer over our CUDA kernels: memcheck, racecheck and initcheck, all at once, on the kernel tests.
set -euo pipefail
pids=()

usage() {
    cat <<'TEXT'
Usage: scripts/sanitize.sh [PYTEST ARG]...    default: the Hopper set in tests/kernels/test_kernel_sets.py

Needs a GPU of compute capability 9.0, SGLang, and compute-sanitizer of the CUDA toolkit on PATH. Prints each tool's
summary and the tests' result; the exit status is 0 if every tool found nothing and every test passed.

Environment:
  PYTHON   the Python that has SGLang and this package (default: python3)
  LOGS     folder of the tools' logs (default: sanitizer-logs)
TEXT
}

case "${1:-}" in -h | --help) usage; exit 0 ;; esac
command -v compute-sanitizer >/dev/null || { echo "scripts/sanitize.sh: compute-sanitizer (CUDA toolkit) is not on PATH" >&2; exit 1; }
cd "$(dirname "${BASH_SOURCE[0]}")/.."
logs=${LOGS:-sanitizer-logs}
mkdir -p "$logs"
[[ $# -gt 0 ]] || set -- tests/kernels/test_kernel_sets.py -k hopper
tools=(memcheck racecheck initcheck)
for tool in "${tools[@]}"; do
    # Only kernels of ours: other libraries' are not ours to mend, and slow.
    compute-sanitizer --tool "$tool" --kernel-regex kns=dsv41 --error-exitcode 9 \
        "${PYTHON:-python3}" -m pytest -q -p no:cacheprovider "$@" >"$logs/$tool.log" 2>&1 &
    pids+=($!)
done
status=0
for i in "${!tools[@]}"; do
    wait "${pids[$i]}" || status=1
    echo "== ${tools[$i]}: $(grep -E 'SUMMARY' "$logs/${tools[$i]}.log" | tail -1)"
    grep -E '[0-9]+ (passed|failed|error)' "$logs/${tools[$i]}.log" | tail -1
done
exit $status
