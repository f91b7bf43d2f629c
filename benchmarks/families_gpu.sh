#!/usr/bin/env bash
# What other families cost on GPUs, one part a call, each within LIMIT (570) seconds on GPUS (4) GPUs:
#   bash benchmarks/families_gpu.sh cells OUTPUT_FOLDER     milliseconds of each family's cells, with what each kernel adds
#   bash benchmarks/families_gpu.sh small OUTPUT_FOLDER     small models of five families, three seeds (families.sh)
#   bash benchmarks/families_gpu.sh tests OUTPUT_FOLDER     tests of verification and of 4-bit families on a GPU
# cells writes cells-N.csv, one a GPU. AFM stands beside an OPT of its width on one GPU. BLOOM-176B has four layers, in
# dense steps and with half of the heads: the paper's point, whose MLP skips 30 %, and one whose MLP keeps 30 %.
# small reads DATA.tar as families.sh does. No part writes more than eight files.
set -u
part=$1 out=$2
gpus=${GPUS:-4} limit=${LIMIT:-570} python=${PYTHON:-python3}
export PYTHONPATH=${PYTHONPATH:-}:. PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
mkdir -p "$out"

rows() {  # GPU MODEL CELLS...
  local gpu=$(($1 % gpus)) model=$2
  shift 2
  CUDA_VISIBLE_DEVICES=$gpu "$python" -m benchmarks.decode --models "$model" --out "$out/cells-$gpu.csv" \
    --time-limit "$((limit - SECONDS))" --cells "$@" >> "$out/cells.log" 2>&1
}

case $part in
cells)
  dense() { echo "engine=dense breakdown=True ${1:-}"; }
  ahead() { echo "engine=sparse head_density=1 site=1 breakdown=True ${1:-}"; }
  coded="weights=int4 predictors=int4 lm_head=int4"
  family() {  # GPU MODEL
    rows "$1" "$2" "$(ahead)" "$(dense)" "$(ahead screen=True)" "$(dense screen=True)" "$(ahead "$coded")" \
      "$(dense "$coded")" engine=hf-compile
  }
  (family 0 afm-4.5b; rows 0 2.7b "$(ahead)" "$(dense)" "$(ahead "$coded")" "$(dense "$coded")") &
  (family 1 prosparse-7b; family 1 bloom-7b1) &
  (family 2 minitron-8b
   rows 2 bloom-176b-4-layers "$(dense)" "engine=sparse mlp_density=0.7,0.3 head_density=0.5 breakdown=True") &
  family 3 nemotron-4-15b &
  wait
  ;;
small) GPUS=$gpus LIMIT=$limit SEEDS="0 1 2" bash benchmarks/families.sh "$out" 14m ;;
tests)
  timeout "$limit" "$python" -m pytest -q -p no:cacheprovider tests/kernels/verify tests/engine/test_slot_pass.py \
    tests/kernels/test_family_engine.py tests/quantize/test_quantize_families.py > "$out/tests.log" 2>&1
  tail -n 5 "$out/tests.log"
  ;;
*) echo "error: the part must be cells, small or tests, got $part" >&2; exit 2 ;;
esac
