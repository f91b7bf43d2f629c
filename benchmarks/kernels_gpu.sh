#!/usr/bin/env bash
# What the kernels have to show on a GPU: their tests, a sanitizer, settings, whole steps before and after, verification.
#   bash benchmarks/kernels_gpu.sh OUTPUT_FOLDER PART...     each of PARTS below, one after the other, within LIMIT (570) s
#   TRY=1 bash benchmarks/kernels_gpu.sh OUTPUT_FOLDER       all of it on a CPU: what is chosen, and tiny shapes
# Parts, with their seconds where each has a call of its own:
#   kernels (200), engine (250)   all tests of tests/kernels with 5 processes a GPU, and of tests/engine with 8
#   memcheck (480), racecheck (480)   compute-sanitizer over tests chosen by MEMORY and RACES, a process each, none of which
#                       may capture a graph: memcheck sees allocations because torch caches none, and a capture forbids them
#   tune (400)          benchmarks.tune for WIDTHS; it goes on from OUTPUT_FOLDER/tune.csv, which TUNED may name
#   alternate (560)     the 20 cells of benchmarks.alternate, ROUNDS (3) times, beside the code in the folder BEFORE (.before):
#                       git archive --prefix .before/ COMMIT dejavu_train kernels benchmarks | tar -x
#   screen (150), products (250)  benchmarks.verification with --screen, and with --products for each of SETTINGS
# OUTPUT_FOLDER gets at most eight files: steps.csv (name, exit code, begin, end), tests.txt, sanitizer.txt, tune.json,
# tune.csv, alternate.csv, verification.csv, logs.tar.xz. A choice of tests that is empty is exit code 5, and a line EMPTY.
set -u
out=$(realpath -m "$1")
shift
. "$(dirname "$0")/steps.sh"
parts=${*:-$(pick "kernels engine memcheck racecheck screen products" "kernels engine memcheck racecheck tune alternate screen products")}
work=${WORK:-$(pick /dev/shm/kernels_gpu /tmp/kernels_gpu)}
logs=$work/logs before=${BEFORE:-.before} tuned=${TUNED:-}
export PYTHONPATH=.:${PYTHONPATH:-} PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=2
if [ -n "$try" ]; then export TRITON_INTERPRET=1; fi
# FILE or FILE::NAME, each with the words that -k takes behind "|". What has an atomic, a ticket or a queue of its own.
memory=${MEMORY:-"tests/kernels/stages/test_listed_int4.py tests/kernels/stages/test_mlp.py|int4 tests/kernels/mlp/test_int4_fc2.py
  tests/kernels/dense/test_int4_batch.py tests/kernels/attention/test_int4_qkv.py tests/kernels/stages/test_attend.py
  tests/kernels/stages/test_norm.py tests/kernels/stages/test_nibbles.py tests/kernels/verify/test_attend_slots.py
  tests/kernels/verify/test_slot_products.py|float64 tests/kernels/verify/test_screened_slots.py"}
races=${RACES:-"tests/kernels/stages/test_listed_int4.py tests/kernels/mlp/test_int4_fc2.py tests/kernels/dense/test_int4_batch.py|programs
  tests/kernels/attention/test_int4_qkv.py|idle tests/kernels/verify/test_attend_slots.py tests/kernels/verify/test_slot_products.py|float64
  tests/kernels/verify/test_screened_slots.py"}
settings=${SETTINGS:-"block=256,stages=3 block=128,stages=4 rows=32,block=256,stages=3"}
mkdir -p "$out" "$logs"
: > "$work/empty"

report() {  # FILE NAME: the end of a step's log, with what failed
  { echo "== $2"; grep -E "^(FAILED|ERROR)|ERROR SUMMARY|RACECHECK SUMMARY|selected| passed| failed|^tests.*: [0-9]+$" "$logs/$2.log" | tail -n 60; } >> "$out/$1"
}

whole() {  # NAME FOLDER PROCESSES SECONDS
  if [ -n "$try" ]; then
    step "$1" "$4" "$python" -m pytest -q --collect-only -p no:cacheprovider "$2"
  else
    local gpus
    gpus=$("$python" -c "import torch; print(torch.cuda.device_count())")
    step "$1" "$4" "$python" -m pytest -q -p no:cacheprovider -n "$(($3 * gpus))" "$2"
  fi
  report tests.txt "$1"
}

sanitize() {  # TOOL SECONDS CHOICES: side by side, for the sanitizer keeps a core busy and not the GPU
  local choice
  for choice in $3; do sanitize_choice "$1" "$2" "$choice" & done
  wait
  keep_logs
}

sanitize_choice() {  # TOOL SECONDS CHOICE
  local tool=$1 seconds=$2 choice=$3 name code
  name=$tool-$(basename "${choice%%|*}" .py)
  keep_logs() { :; }
  set -- "${choice%%|*}"
  if [[ $choice == *"|"* ]]; then set -- "$@" -k "${choice#*|}"; fi
  if [ -n "$try" ]; then
    step "$name" 600 "$python" -m pytest -q --collect-only -p no:cacheprovider "$@"
  else
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 step "$name" "$seconds" compute-sanitizer --tool "$tool" --error-exitcode 9 \
      --target-processes all "$python" -m pytest -q -x -p no:cacheprovider -p no:xdist "$@"
  fi
  code=$?
  if [ "$code" = 5 ]; then echo "EMPTY $choice" | tee -a "$out/sanitizer.txt"; fi
  report sanitizer.txt "$name"
}

run_part() {
  case $1 in
    kernels) whole kernels tests/kernels 5 "$(pick 300 600)" ;;
    engine) whole engine tests/engine 8 "$(pick 400 600)" ;;
    memcheck) sanitize memcheck 480 "$memory" ;;
    racecheck) sanitize racecheck 480 "$races" ;;
    tune)
      if [ -n "$tuned" ]; then cp "$tuned" "$out/tune.csv"; fi
      step tune 560 "$python" -m benchmarks.tune --seconds "$(($(left) - 30))" --widths ${WIDTHS:-4096 7168 9216} \
        --out "$out/tune.json" --log "$out/tune.csv" ;;
    alternate)
      if [ ! -e "$before/benchmarks/decode.py" ]; then echo "no code of before in $before"; return 2; fi
      step alternate 560 "$python" -m benchmarks.alternate --before "$before" --out "$work/alternate" \
        --rounds "${ROUNDS:-3}" --seconds "$(($(left) - 60))"
      cp "$work/alternate/alternate.csv" "$out/alternate.csv"
      cp "$work"/alternate/{before,after}.{csv,log} "$logs"
      keep_logs ;;
    screen)
      step screen "$(pick 200 900)" "$python" -m benchmarks.verification --screen --steps "$(pick 24 2)" \
        $(pick "--shapes ${SHAPES:-6.7b 30b 66b}" --tiny) --out "$out/verification.csv" ;;
    products)
      local words
      for words in $settings; do words="$words"; set -- "$@" "${words//,/ }"; done
      shift
      step products "$(pick 400 900)" "$python" -m benchmarks.verification --products --steps "$(pick 24 2)" \
        $(pick "--shapes ${SHAPES:-6.7b 30b 66b}" --tiny) --try "$@" --out "$out/verification.csv" ;;
    *) echo "no part $1" >&2; return 2 ;;
  esac
}

for part in $parts; do
  if [ "$(left)" -lt 20 ]; then echo "no time for $part" | tee -a "$out/steps.csv"; continue; fi
  run_part "$part"
done
ls "$out"
