#!/usr/bin/env bash
# The decode engine with 4-bit weights against `mask` of the same quantised model, on one GPU, in about ten minutes:
#   bash benchmarks/fidelity_int4.sh OUTPUT_FOLDER        TRY=1: what comes before the comparison, on a CPU, tiny
# Two models: opt-mini, and a 100M model that is pretrained here on .data (benchmarks/hundred.sh) for PRETRAIN_SECONDS.
# Each is rounded to nearest and writes text, on which predictors are trained: of the blocks' own inputs, or ("ahead")
# of those one half earlier, with which no stage lies before q/k/v. OUTPUT_FOLDER gets a JSON file for each model
# and kind of predictor, fidelity_int4.json of all, and logs. ONLY names some: "opt-mini-own opt-mini-ahead opt-100m-own
# opt-100m-ahead". One row at a time but in `replay` and `rows`: the kernels of several rows are others.
set -u
out=$1 only=${ONLY:-opt-mini-own opt-mini-ahead opt-100m-own opt-100m-ahead}
. "$(dirname "$0")/steps.sh"
work=${WORK:-$(pick /dev/shm/fidelity /tmp/fidelity)} data=${DATA:-.data}
device=$(pick cuda cpu) limit=${LIMIT:-$(pick 900 3000)} logs=$out
export PYTHONPATH=${PYTHONPATH:-}:. PYTHONUNBUFFERED=1 OMP_NUM_THREADS=$(pick 4 1) OMP_WAIT_POLICY=PASSIVE
export HF_HUB_DISABLE_PROGRESS_BARS=1 TOKENIZERS_PARALLELISM=false
mkdir -p "$out" "$work"
work=$(mktemp -d "$work/run.XXXXXX")
trap 'rm -rf "$work"' EXIT

keep_logs() { :; }  # they lie in OUTPUT_FOLDER

compare() {  # NAME KIND FLAGS...
  local name=$1 kind=$2
  shift 2
  case " $only " in *" $name-$kind "*) ;; *) return ;; esac
  step "train-$name-$kind" 400 "$python" train.py --config=configs/opt-mini.yaml --model="$work/$name-int4" \
    --output="$work/$name-$kind" --calibrate.cascade=null --calibrate.head_density=0.85 \
    --calibrate.sensitivity_tokens=0 --text.cache="$work/text" --text.sample.tokens="$(pick 140000 24000)" \
    --collect.train_tokens="$(pick 100000 5000)" --collect.val_tokens="$(pick 10000 1024)" \
    --collect.calibration_tokens="$(pick 20000 1024)" --collect.device="$device" --trainer.logger=false \
    --trainer.accelerator="$(pick gpu cpu)" --mlp.steps="$(pick 400 5)" --heads.steps="$(pick 400 5)" "$@" || return
  [ -n "$try" ] || step "fidelity-$name-$kind" 400 "$python" -m benchmarks.fidelity --model "$work/$name-int4" \
    --bundle "$work/$name-$kind/bundle" --batch 1 --rows 18 --length 256 --parts half greedy prompts replay rows \
    --out "$out/$name-$kind.json"
}

whole() {  # NAME MODEL
  step "quantise-$1" 400 "$python" -m dejavu_train.quantize --model "$2" --output "$work/$1-int4" --quantizer rtn \
    --device "$device" || return
  compare "$1" own
  compare "$1" ahead --mlp.lookahead 1 --heads.lookahead 1 --heads.lookahead_nearest true
}

whole opt-mini checkpoints/opt-mini &
shape=$(pick "--d_model 768 --n_layers 12 --n_heads 12 --d_ffn 3072 --context 512" \
  "--d_model 64 --n_layers 3 --n_heads 2 --d_ffn 128 --context 512 --batch_rows 2 --vocab_size 300 --device cpu")
step pretrain 400 "$python" -m dejavu_train.extras.pretrain --output "$work/opt-100m" \
  --text "$data/$(pick general_train.jsonl.xz general_heldout.jsonl)" --heldout "$data/books_heldout.jsonl" $shape \
  --seconds "$(pick "${PRETRAIN_SECONDS:-60}" 5)" && whole opt-100m "$work/opt-100m"
wait
"$python" - "$out" <<'PY'
import json, sys
from pathlib import Path
folder = Path(sys.argv[1])
found = [json.loads(file.read_text()) for file in sorted(folder.glob("opt-*-*.json"))]
(folder / "fidelity_int4.json").write_text(json.dumps(found, indent=1) + "\n")
PY
echo "$SECONDS s"
