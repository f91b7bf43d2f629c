#!/usr/bin/env bash
# Small models of every family by one recipe, and what their predictors lose: the rows of docs/results/families/*.csv
#   bash benchmarks/families.sh OUTPUT_FOLDER 14m      five models on GPUS (4) GPUs in LIMIT (560) seconds
#   bash benchmarks/families.sh OUTPUT_FOLDER 100m     four larger ones, one seed
#   TRY=1 bash benchmarks/families.sh OUTPUT_FOLDER    all of it on a CPU with tiny sizes
# Each of MODELS pretrains on the same text with the same steps, all side by side. Then it writes text, and predictors of
# each of SEEDS learn on it by the same settings, with and without look-ahead (AHEAD: seeds of that). They have no second
# stage, which a gated MLP cannot have. A row is written for each of DENSITIES and TEXTS as soon as it is scored. DATA (.data) holds the texts that `python -m benchmarks.texts
# prepare` writes, and train_general.jsonl.xz and train_books.jsonl.xz. A file DATA.tar with them is unpacked first.
# OUTPUT_FOLDER gets rows.csv, models.jsonl and logs.tar.xz, renewed every minute and at the end. At the end of LIMIT what
# still runs is stopped.
set -u
out=$1 size=${2:-14m}
. "$(dirname "$0")/steps.sh"
work=${WORK:-$(pick /dev/shm/families /tmp/families)} data=${DATA:-.data}
export PYTHONPATH=${PYTHONPATH:-}:. PYTHONUNBUFFERED=1 OMP_NUM_THREADS=$(pick 2 1) OMP_WAIT_POLICY=PASSIVE
export HF_HUB_DISABLE_PROGRESS_BARS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=true RAYON_NUM_THREADS=$(pick 6 1)
export TORCHINDUCTOR_COMPILE_THREADS=6
limit=${LIMIT:-$(pick 560 3000)} gpus=${GPUS:-4} rows=$work/rows
logs=$rows steps=$rows/steps.txt
# FAMILY-SIZE:GPU. The predictors of seed 0 are trained where the model was, those of seed 1 a GPU further on.
models=${MODELS:-"opt-$size:0 arcee-$size:1 llama-relu-$size:2 bloom-$size:3"}
if [ -z "${MODELS:-}" ] && [ "$size" = 14m ]; then models="$models llama-drelu-14m:3"; fi
export seeds_14m=${SEEDS:-0 1 2} seeds_100m=${SEEDS_100M:-0} ahead=${AHEAD:-0}
export steps_14m=${STEPS:-$(pick 2200 3)} steps_100m=${STEPS_100M:-$(pick 2000 3)} seconds=${PRETRAIN_SECONDS:-$(pick 180 60)}
densities=${DENSITIES:-0.05/1,0.08/1,0.1/1,0.15/1,0.2/1,0.3/1,0.5/1,0.7/1,0.2/0.85,1/0.85,1/0.5,0.7/0.5}
texts=${TEXTS:-docs,books,general,wikitext,readmes,code,licences,lambada}
mkdir -p "$out" "$rows" "$work/models"
if [ -e "$data.tar" ]; then
  data=$work/data
  mkdir -p "$data" && tar -xf "${DATA:-.data}.tar" -C "$data"
fi
common="--data $data --texts $texts --tokens $(pick "${TOKENS:-30000}" 600) --cache $work/text"
common="$common --calibrate.cascade=null --trainer.accelerator=$(pick gpu cpu) --text.sample.batch_size=$(pick 256 16)"
export common="$common $(pick "" "--mlp.steps=10 --heads.steps=10 --calibrate.sensitivity_tokens=1024")"
export device=$(pick cuda cpu) compile=$(pick true false) densities
export text=$(pick "$data/train_general.jsonl.xz $data/train_books.jsonl.xz $data/train_docs.jsonl.xz" "$data/books.jsonl")
export heldout=$(pick "$data/books.jsonl $data/docs.jsonl $data/general.jsonl" "$data/licences.jsonl")

keep_logs() { :; }  # the ticker packs

pack() {
  local csv all=$out/.rows.csv
  : > "$all"
  for csv in "$rows"/*.csv; do
    [ -s "$csv" ] || continue
    if [ -s "$all" ]; then tail -n +2 "$csv" >> "$all"; else cat "$csv" > "$all"; fi
  done
  mv "$all" "$out/rows.csv"
  for json in "$work"/models/*/pretraining.json; do
    [ -e "$json" ] && "$python" -c "import json, sys; print(json.dumps(json.load(open(sys.argv[1]))))" "$json"
  done > "$out/.models.jsonl"
  mv "$out/.models.jsonl" "$out/models.jsonl"
  tar -cJf "$out/.logs.tar.xz" -C "$work" rows
  [ $? -le 1 ] && mv "$out/.logs.tar.xz" "$out/logs.tar.xz"  # 1: a log grew meanwhile
}

shape() {  # FAMILY SIZE: the sizes of a model. A gate is a third matrix, so a gated MLP has two thirds of the neurons
  local width=384 layers=6 context=1024 rows_=64
  if [ "$2" = 100m ]; then width=768 layers=12 context=512; fi
  if [ -n "$try" ]; then width=96 layers=2 context=64 rows_=4; fi
  local neurons=$((4 * width))
  case $1 in llama-*) neurons=$((8 * width / 3)) ;; esac
  echo "--d_model $width --n_layers $layers --n_heads $((width / $(pick $((width == 384 ? 32 : 64)) 32)))" \
    "--d_ffn $neurons --context $context --batch_rows $rows_"
}

pretrain() {  # NAME FAMILY SIZE
  local name=$1 folder=$work/models/$1 count=steps_$3
  mkdir -p "$folder"
  cp checkpoints/opt-mini/tokenizer.json checkpoints/opt-mini/tokenizer_config.json "$folder"
  set -- "$python" -m dejavu_train.extras.pretrain --output "$folder" --family "$2" --text $text $(shape "$2" "$3") \
    --heldout $heldout --steps "${!count}" --seconds "$seconds" \
    --learning_rate "$([ "$3" = 100m ] && echo 2e-3 || echo 3e-3)" --warmup_steps 100 --device "$device" \
    --checkpoint_seconds 1000
  step "$name-pretrain" "$(left 8)" "$@" --compile "$compile" || {
    rm -f "$folder/pretraining.ckpt"
    step "$name-again" "$(left 8)" "$@"
  }
}

study() {  # NAME SIZE SEED LABEL FLAGS...
  local name=$1 size=$2 seed=$3 label=$4 pairs=$densities
  shift 4
  local sizes="--text.sample.tokens=$(pick 400000 24000) --mlp.rank=$(pick 64 8) --batch-tokens $(pick 16384 600)"
  if [ "$size" = 100m ]; then
    sizes="--text.sample.tokens=$(pick 250000 24000) --mlp.rank=$(pick 128 8) --batch-tokens $(pick 8192 600)"
  fi
  if [ -n "$label" ]; then pairs=$(tr , '\n' <<< "$pairs" | grep '^0.*/1$' | paste -sd,); fi
  step "$name-$seed$label" "$(left 8)" "$python" -m benchmarks.texts run --model "$work/models/$name" --training self --seed "$seed" \
    $common $sizes --densities "$pairs" --label "$label" --work "$work/$name" --output "$rows/$name-$seed$label.csv" "$@"
}

one() {  # FAMILY-SIZE:GPU
  local name=${1%:*} gpu=${1#*:}
  local size=${name##*-} chosen
  local seeds=seeds_$size seed
  IFS=, read -ra chosen <<< "${CUDA_VISIBLE_DEVICES:-}"
  place() {  # NUMBER: of the GPU for what follows
    if [ -z "$try" ]; then export CUDA_VISIBLE_DEVICES=${chosen[$(($1 % gpus))]:-$(($1 % gpus))}; fi
  }
  place "$gpu"
  [ -e "$work/models/$name/config.json" ] || pretrain "$name" "${name%-*}" "$size" || return 1
  for seed in ${!seeds}; do
    place "$((gpu + seed))"
    if [ -n "$try" ]; then study "$name" "$size" "$seed" ""; else study "$name" "$size" "$seed" "" & fi
  done
  for seed in $ahead; do  # heads are left alone: the predictors of neurons read what stands half a layer earlier
    place "$((gpu + seed))"
    if [ -z "$try" ]; then sleep 5; fi  # the text of this seed is written once
    study "$name" "$size" "$seed" lookahead --mlp.lookahead=1 --heads.enabled=false --calibrate.head_density=1.0 &
    if [ -n "$try" ]; then wait; fi
  done
  wait
}

ticker() { while sleep 60; do pack; done; }
ticker > /dev/null 2>&1 &  # its sleep holds no pipe of this script
ticks=$!
trap 'kill $ticks; wait $ticks 2> /dev/null; pack' EXIT
jobs_=""
for model in $models; do
  one "$model" &
  if [ -n "$try" ]; then wait $!; else jobs_="$jobs_ $!"; fi
done
if [ -n "$jobs_" ]; then wait $jobs_; fi
echo "$((SECONDS - began)) s, $(($(wc -l < "$out/rows.csv" 2> /dev/null || echo 1) - 1)) rows at the last minute"
