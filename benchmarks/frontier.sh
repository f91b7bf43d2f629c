#!/usr/bin/env bash
# The rows of docs/frontier/rivals.csv on one GPU: bash benchmarks/frontier.sh OUTPUT.csv
# Needs .data (python -m benchmarks.texts prepare). The rivals and the seeds run side by side.
set -u
out=${1:-docs/frontier/rivals.csv} rows=$(mktemp -d) work=${WORK:-/dev/shm/frontier}
export PYTHONPATH=${PYTHONPATH:-}:. PYTHONUNBUFFERED=1 OMP_NUM_THREADS=2 HF_HUB_DISABLE_PROGRESS_BARS=1
common="--work $work --text.cache=$work/text --trainer.accelerator=gpu ${FLAGS:-}"
number=0
for run in rivals "trained --seed 0" "trained --seed 1" "trained --seed 2"; do
  number=$((number + 1))
  # shellcheck disable=SC2086
  { python3 -m benchmarks.frontier $run $common --output "$rows/$number.csv" > "$rows/$number.log" 2>&1 ||
    { echo "failed: $run"; tail -5 "$rows/$number.log"; } >&2; } &
done
wait
grep -h " in [0-9]* s\|not scored" "$rows"/*.log >&2
for csv in "$rows"/*.csv; do
  if [ -e "$out" ]; then tail -n +2 "$csv" >> "$out"; else cp "$csv" "$out"; fi
done
