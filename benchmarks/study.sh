#!/usr/bin/env bash
# Rows of docs/texts/study.csv on GPUs, as many jobs beside each other as JOBS says, spread over all GPUs:
#   bash benchmarks/study.sh OUTPUT_FOLDER [VARIANT ...]      all variants of `python -m benchmarks.study list` by default
# Needs .data/val_*.jsonl (python -m benchmarks.texts prepare-val). Rows and logs are written as they come, a file each per
# variant in OUTPUT_FOLDER, so that a time limit loses only what was running; `cat` joins them (study.sh join OUTPUT_FOLDER CSV).
set -u
export PYTHONPATH=${PYTHONPATH:-}:. PYTHONUNBUFFERED=1 OMP_NUM_THREADS=2 HF_HUB_DISABLE_PROGRESS_BARS=1
if [ "$1" = join ]; then
  for csv in "$2"/*.csv; do
    if [ -e "$3" ]; then tail -n +2 "$csv" >> "$3"; else cp "$csv" "$3"; fi
  done
  exit
fi
export out=$1 work=${WORK:-/dev/shm/study} gpus=${GPUS:-$(nvidia-smi -L | wc -l)} seed=${SEED:-0} extra=${EXTRA:-}
shift
mkdir -p "$out"
variants=${*:-$(python3 -m benchmarks.study list)}

one() {  # NUMBER COMMAND NAME: one text collected or one variant's rows
  local log="$out/$2-$3-$seed.log"
  CUDA_VISIBLE_DEVICES=$(($1 % gpus)) python3 -m benchmarks.study "$2" "$3" --work "$work" --seed "$seed" $extra \
    --output "$out/$3-$seed.csv" > "$log" 2>&1 || { echo "$2 $3 failed"; tail -3 "$log"; } >&2
  grep -hE "collected in|10.6 % of|heads at" "$log" >&2
}
export -f one

needed=$(python3 -m benchmarks.study texts $variants)
echo "$needed" | nl -w1 -s' ' -v0 | sed 's/ / collect /' | xargs -P "${JOBS:-12}" -L 1 bash -c 'one "$@"' bash
echo "collected after $SECONDS s" >&2
printf '%s\n' $variants | nl -w1 -s' ' -v0 | sed 's/ / run /' | xargs -P "${JOBS:-12}" -L 1 bash -c 'one "$@"' bash
echo "all done after $SECONDS s" >&2
