# Read by each script of this folder: `stage SECONDS NAME COMMAND...` runs a command under a limit and goes on whatever
# it says. What it prints goes to $OUT/NAME.log, and all records so far to $OUT/results.tar.gz, for `harness report`.
# With DRY=1 the places are those of the CPU and the sizes small; with ONLY="NAME NAME" no other stages run.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
OUT=${OUT:-gpu/out}
DRY=${DRY:-}
PYTHON=${PYTHON:-python3}
[ ! -f .commit ] || export GIT_DIR=/dev/null  # a copy may come with a .git of another state
mkdir -p "$OUT"
OUT=$(cd "$OUT" && pwd)
failed=()

site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
export PYTHONPATH=$PWD:$site PYTHONUNBUFFERED=1
if compgen -G 'gpu/wheels/*.whl' > /dev/null; then
    $PYTHON -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --target "$site" gpu/wheels/*.whl ||
        { echo "the wheels cannot be installed: pack them for this Python, gpu/pack VERSION"; exit 1; }
fi

# Name the project and its entry points as pip would: strategies and workloads are discovered by them.
$PYTHON - "$site/memory_strategy_harness-0.dist-info" << 'END'
import sys, tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
points = ""
for group, values in project["entry-points"].items():
    points += f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in values.items())
folder = Path(sys.argv[1])
folder.mkdir()
(folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
(folder / "entry_points.txt").write_text(points)
END

stage() {
    local seconds=$1 name=$2 code=0
    shift 2
    [[ -z ${ONLY:-} || " $ONLY " == *" $name "* ]] || return 0
    timeout --kill-after=10 "$seconds" "$@" > "$OUT/$name.log" 2>&1 || code=$?
    if [ "$code" -eq 124 ]; then echo "$name: stopped after $seconds s"; else echo "$name: ended with $code"; fi
    if [ "$code" -ne 0 ]; then failed+=("$name") && tail -n 15 "$OUT/$name.log"; fi
    if [ -d "$OUT/results" ]; then  # rows that fail do not make a run fail
        grep -rhoE '"status": "[a-z_]+"' "$OUT/results" | sort | uniq -c | sed "s/^/    rows of all stages so far:/" || true
        tar -C "$OUT" -czf "$OUT/results.part" results && mv "$OUT/results.part" "$OUT/results.tar.gz"
    fi
}

# A stage that failed makes the script fail.
finish() {
    [ ${#failed[@]} -eq 0 ] || { echo "failed: ${failed[*]}"; exit 1; }
}
