#!/usr/bin/env bash
# The decode engine with 4-bit weights on one GPU: bash benchmarks/int4_decode.sh OUT [BUNDLE]
# Tests of the engine, its fidelity on opt-mini (quantised here by rounding to nearest; BUNDLE is the fp16 model's, its
# predictors taken as they are), then rows of decode.csv in order of worth. BUDGET seconds in all (default 600): nothing
# starts behind them. Each row is written as it comes; OUT.tar holds everything in OUT, renewed after each step. ONLY
# names steps to run: "tests fidelity 6.7b 66b 175b 30b batches".
set -u
out=$1 bundle=${2:-}
. "$(dirname "$0")/steps.sh"
limit=${BUDGET:-600} logs=$out only=${ONLY:-tests fidelity 6.7b 66b 175b 30b batches}
export PYTHONPATH=${PYTHONPATH:-}:. PYTHONUNBUFFERED=1 OMP_WAIT_POLICY=PASSIVE
mkdir -p "$out"

keep_logs() {  # with all rows: a killed call keeps them
  tar -C "$(dirname "$out")" -cf "$out.part" "$(basename "$out")" && mv "$out.part" "$out.tar"
}

cells() {  # NAME MODEL CELLS...
  local name=$1 model=$2
  shift 2
  step "$name" 400 "$python" -m benchmarks.decode --models "$model" --out "$out/decode.csv" --time-limit "$(left 15)" \
    --cells "$@"
}

sparse="weights=int4 predictors=int4 head_density=0.85,1.0,0.5"  # predictors run before fc1
head="lm_head=int4"  # the LM head in 4 bits as well: 50272 rows
ahead="$sparse site=1"  # and within attention
several="weights=int4 predictors=int4 head_density=1.0"
for name in $only; do
  if [ "$(left)" -lt 10 ]; then break; fi
  case $name in
    tests)
      step tests 150 "$python" -m pytest -q -m gpu -n 12 --timeout 140 tests/engine/test_four_bits_gpu.py ;;
    fidelity)
      [ -z "$bundle" ] && continue
      step quantise 60 "$python" -m dejavu_train.quantize --model checkpoints/opt-mini --quantizer rtn --output "$out/opt-mini-int4"
      step fidelity 100 "$python" -m benchmarks.fidelity --model "$out/opt-mini-int4" --bundle "$bundle" --adopt --batch 8 \
        --rows 16 --length 256 --parts half greedy prompts replay --out "$out/fidelity_int4.json"
      rm -rf "$out/opt-mini-int4" ;;
    6.7b) cells 6.7b 6.7b "engine=dense weights=int4 breakdown=True" "$ahead" "$sparse breakdown=True" \
      "engine=dense weights=int4 $head breakdown=True" "$ahead $head head_density=0.85" ;;
    66b) cells 66b 66b "engine=dense weights=int4" "$ahead" "$sparse head_density=0.85 breakdown=True" \
      "engine=dense weights=int4 $head" "$ahead $head head_density=0.85" ;;
    175b) cells 175b 175b "engine=dense weights=int4" "$ahead" "$sparse" ;;
    30b) cells 30b 30b "engine=dense weights=int4" "$ahead" ;;
    batches) cells batches 66b "engine=dense weights=int4 batch=2,4,8" "$several batch=2 mlp_density=0.08" \
      "$several batch=4 mlp_density=0.116" "$several batch=8 mlp_density=0.175"
      cells batches-6.7b 6.7b "engine=dense weights=int4 batch=2,8" "$several batch=2 mlp_density=0.153" \
        "$several batch=8 mlp_density=0.29" ;;
    *) echo "no step is called $name" ;;
  esac
done
