# Read by each script of this folder: `stage SECONDS NAME COMMAND...` runs a command under a limit and goes on whatever
# it says. What it prints goes to $OUT/NAME.log. With DRY=1 the places are those of the CPU and the sizes small.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
OUT=${OUT:-gpu/out}
DRY=${DRY:-}
PYTHON=${PYTHON:-python3}
mkdir -p "$OUT"
OUT=$(cd "$OUT" && pwd)
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1
failed=()

if compgen -G 'gpu/wheels/*.whl' > /dev/null; then
    site=$(mktemp -d)
    $PYTHON -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --target "$site" gpu/wheels/*.whl
    export PYTHONPATH=$PWD:$site
fi

stage() {
    local seconds=$1 name=$2 code=0
    shift 2
    timeout --kill-after=10 "$seconds" "$@" > "$OUT/$name.log" 2>&1 || code=$?
    if [ "$code" -eq 124 ]; then echo "$name: stopped after $seconds s"; else echo "$name: ended with $code"; fi
    if [ "$code" -ne 0 ]; then failed+=("$name") && tail -n 15 "$OUT/$name.log"; fi
}

# The records of suites come back as one file, for `harness report`; a stage that failed makes the script fail.
finish() {
    if [ -d "$OUT/results" ]; then tar -C "$OUT" -czf "$OUT/results.tar.gz" results; fi
    [ ${#failed[@]} -eq 0 ] || { echo "failed: ${failed[*]}"; exit 1; }
}
