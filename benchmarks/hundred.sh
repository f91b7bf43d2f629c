#!/usr/bin/env bash
# 4-bit weights of a 100M model with the sparse model, rows of docs/results/frontier/int4.csv, on one GPU in LIMIT seconds:
#   bash benchmarks/hundred.sh OUTPUT_FOLDER        TRY=1 runs all of it on a CPU with tiny sizes
# Pretrains the model on .data/general_train.jsonl.xz and .data/train_docs.jsonl.xz (texts.sh says how they are made). For
# each of SEEDS (0) the model writes text, predictors are trained on it ("before"), GPTQ quantises with it, predictors are
# trained on the quantised model ("after"); every report's rows are written as they come. GPUS (1) GPUs take a seed each,
# one seed after the other: three seeds side by side on one GPU trained for 350 s and were not done within the limit.
# PARTS ("before after") names what is made beside the dense rows; RANK (128) and DENSITIES are the predictors'.
# HEADS=1 also scores the LM head in 8 and 4 bits.
# OUTPUT_FOLDER/hundred.tar.xz holds rows and logs, renewed every two minutes and at the end. $WORK/opt-100m with
# $WORK/before-0/bundle is what benchmarks/eval_gpu.sh takes as MODEL2 and BUNDLE2. Each run pretrains another model: rows
# that are put beside those of an earlier one get another name in the column `model` (`quantize show` refuses a mixture).
set -u
out=$1
. "$(dirname "$0")/steps.sh"
work=${WORK:-$(pick /dev/shm/hundred /tmp/hundred)} data=${DATA:-.data}
export PYTHONPATH=${PYTHONPATH:-}:. PYTHONUNBUFFERED=1 OMP_NUM_THREADS=$(pick 2 1) OMP_WAIT_POLICY=PASSIVE
export HF_HUB_DISABLE_PROGRESS_BARS=1 TOKENIZERS_PARALLELISM=true
limit=${LIMIT:-520} gpus=${GPUS:-1} seeds=${SEEDS:-0} model=$work/opt-100m rows=$work/rows
logs=$rows steps=$rows/steps.csv
export parts=${PARTS:-before after}
export device=$(pick cuda cpu) tokens=$(pick 40000 200) sample=$(pick 400000 24000)
export texts=${TEXTS:-docs,books,wikitext,general,readmes,code,licences}
flags="--config=configs/opt-mini.yaml --model=$model --trainer.logger=false --text.sample.tokens=$sample"
flags="$flags --text.cache=$work/text --mlp.rank=$(pick "${RANK:-128}" 8) --trainer.accelerator=$(pick gpu cpu)"
export flags="$flags $(pick "" "--mlp.steps=20 --heads.steps=20 --calibrate.sensitivity_tokens=1024")"
quantise="--text.cache=$work/text --text.sample.tokens=$sample --device=$device"
export quantise="$quantise $(pick "" "--tokens=1300")"
report="--model $model --data $data --tokens $tokens --device $device"
export report="$report --batch-tokens $(pick 8192 512)"
mkdir -p "$out" "$rows"

keep_logs() { :; }  # the ticker packs

pack() {
  tar -cJf "$out/.hundred.tar.xz" -C "$work" rows
  [ $? -le 1 ] && mv "$out/.hundred.tar.xz" "$out/hundred.tar.xz"  # 1: a log grew meanwhile
}

train() {  # NAME MODEL SEED FLAGS...: a bundle in $work/NAME, each half of the layers in a process of its own
  local name=$1 trained=$2 seed=$3 layers=$((${LAYERS:-12} - 1))
  shift 3
  set -- "$python" train.py $flags --model="$trained" --output="$work/$name" --seed="$seed" \
    --text.sample.seed="$seed" "$@"
  step "train-$name-low" "$(left 8)" "$@" --layers="0-$((layers / 2))" &
  step "train-$name-high" "$(left 8)" "$@" --layers="$((layers / 2 + 1))-$layers"
  wait
  rm -rf "$work/$name/activations"
  test -f "$work/$name/bundle/bundle.json"
}

written() {  # SEED: waits until the model has written its text with this seed
  until grep -qs "\"seed\": $1\$" "$work"/text/self-*/samples.json; do
    sleep 1
    [ "$(left 60)" -gt 0 ] || return 1
  done
}

score() {  # NAME SEED ARGUMENTS...: rows of a report
  local name=$1 seed=$2
  shift 2
  step "report-$name-$seed" "$(left 8)" "$python" -m benchmarks.quantize report $report --seed "$seed" --texts "$texts" \
    --csv "$rows/report-$name-$seed.csv" "$@"
}

ready() {  # PATH: waits until it is there
  until [ -e "$1" ]; do
    sleep 1
    [ "$(left 20)" -gt 0 ] || return 1
  done
}

before() {  # SEED
  train "before-$1" "$model" "$1" && ready "$work/gptq-$1" && score before "$1" --weights "gptq=$work/gptq-$1" \
    --bundles "before=$work/before-$1/bundle" --densities $densities --rows before
}

after() {  # SEED
  train "after-$1" "$work/gptq-$1" "$1" && ready "$work/before-$1/bundle" && score after "$1" \
    --weights "gptq=$work/gptq-$1" --densities $densities --rows after \
    --bundles "before=$work/before-$1/bundle" "after=$work/after-$1/bundle"
}

whole_seed() {  # SEED
  before "$1" &
  written "$1" && step "gptq-$1" "$(left 8)" "$python" -m dejavu_train.quantize --model "$model" --output "$work/gptq-$1" \
    $quantise --seed "$1" --text.sample.seed="$1" || { wait; return 1; }
  score dense "$1" --weights "rtn=$work/rtn" "gptq=$work/gptq-$1" --bundles &
  case $parts in *after*) after "$1" ;; esac
  wait
}

shape=$(pick "--d_model 768 --n_layers 12 --n_heads 12 --d_ffn 3072 --context 512" \
  "--d_model 64 --n_layers 2 --n_heads 2 --d_ffn 128 --context 64 --batch_rows 2 --vocab_size 300 --device cpu")
[ -n "$try" ] && export LAYERS=2
export densities="${DENSITIES:-0.08/1 0.1/1 0.2/1 0.1/0.85 0.2/0.85 0.06/0.85 0.08/0.85 0.08/0.8 0.08/0.75}"
ticker() { while sleep 120; do pack; done; }
ticker &
ticks=$!
trap 'kill $ticks; pack' EXIT

text=$(pick "$data/general_train.jsonl.xz $data/train_docs.jsonl.xz" "$data/books.jsonl")
step pretrain "$(left 8)" "$python" -m dejavu_train.extras.pretrain --output "$model" --text $text \
  --heldout "$data/books.jsonl" "$data/docs.jsonl" $shape --seconds "$(pick "${PRETRAIN_SECONDS:-110}" 5)" || exit 1
step rtn "$(left 8)" "$python" -m dejavu_train.quantize --model "$model" --output "$work/rtn" --quantizer rtn --device "$device" &
heads() {  # the LM head in codes as well
  local seed=${seeds%% *} kind
  ready "$work/gptq-$seed" || return 1
  for kind in int8 int4; do
    step "head-$kind" "$(left 8)" "$python" -m dejavu_train.quantize --model "$model" --output "$work/head-$kind" $quantise \
      --seed "$seed" --text.sample.seed="$seed" --lm_head "$kind" || return 1
  done
  score heads "$seed" --bundles --weights "gptq=$work/gptq-$seed" "gptq, LM head int8=$work/head-int8" \
    "gptq, LM head int4=$work/head-int4"
}
jobs_=""
if [ -n "${HEADS:-}" ]; then
  heads &
  jobs_=$!
fi
worker() {  # GPU: its seeds, one after the other
  local seed chosen
  IFS=, read -ra chosen <<< "${CUDA_VISIBLE_DEVICES:-}"
  [ -n "$try" ] || [ "$gpus" = 1 ] || export CUDA_VISIBLE_DEVICES=${chosen[$1]:-$1}  # one GPU: the caller's choice stays
  for seed in $seeds; do
    if [ "$((seed % gpus))" = "$1" ] && [ "$(left 60)" -gt 0 ]; then whole_seed "$seed"; fi
  done
}
for gpu in $(seq 0 $((gpus - 1))); do
  worker "$gpu" &
  jobs_="$jobs_ $!"
done
wait $jobs_
echo "$((SECONDS - began)) s; MODEL2=$model BUNDLE2=$work/before-0/bundle; $out/hundred.tar.xz"
