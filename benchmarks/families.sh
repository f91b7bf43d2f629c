#!/usr/bin/env bash
# Small models of every family by one recipe, and what their predictors lose: the rows of docs/results/families/*.csv
#   bash benchmarks/families.sh OUTPUT_FOLDER 14m      five models on GPUS (4) GPUs, three seeds
#   bash benchmarks/families.sh OUTPUT_FOLDER 100m     larger ones, one seed
#   bash benchmarks/families.sh OUTPUT_FOLDER 50m      Arcee and Nemotron-H, each of three seeds from pretraining on
#   TRY=1 bash benchmarks/families.sh OUTPUT_FOLDER    all of it on a CPU with tiny sizes
# Each of MODELS pretrains on the same text with the same steps. Then it writes text, and predictors of each of SEEDS learn
# on it by the same settings. Predictors of seed 0 are also trained with look-ahead. They have no second stage, which a
# gated MLP cannot have. DATA (.data) holds the texts that `python -m benchmarks.texts prepare` writes, and others that
# begin with train_. JOBS (GPUS) models are made at a time. OUTPUT_FOLDER gets rows.csv, models.jsonl and logs.
set -u
export out=$(realpath -m "$1") size=${2:-14m} try=${TRY:-} python=${PYTHON:-python3}
pick() { if [ -n "$try" ]; then echo "$2"; else echo "$1"; fi; }  # ON_A_GPU WHEN_TRIED
export -f pick
export work=${WORK:-$(pick /dev/shm/families /tmp/families)} data=${DATA:-.data} gpus=${GPUS:-4}
export PYTHONPATH=${PYTHONPATH:-}:. PYTHONUNBUFFERED=1 OMP_NUM_THREADS=$(pick 2 1) HF_HUB_OFFLINE=1
export seeds=${SEEDS:-$([ "$size" = 100m ] && echo 0 || echo 0 1 2)}
models=${MODELS:-$([ "$size" = 50m ] && echo arcee nemotron-h || echo opt arcee llama-relu llama-drelu bloom)}
mkdir -p "$out" "$work"

shape() {  # FAMILY: the sizes of a model. A gate is a third matrix, so a gated MLP has two thirds of the neurons
  local width=384 layers=6 context=1024 rows=64 head=32 neurons
  case $size in
    100m) width=768 layers=12 context=512 head=64 ;;
    50m) width=512 layers=11 context=512 rows=32 head=64 ;;
  esac
  if [ -n "$try" ]; then width=96 layers=2 context=64 rows=4 head=32; fi
  neurons=$((4 * width))
  case $1-$size in llama-*) neurons=$((8 * width / 3)) ;; *-50m) neurons=$((6 * width)) ;; esac
  case $1 in nemotron-h) layers=$(pick 16 8) ;; esac
  echo "--d_model $width --n_layers $layers --n_heads $((width / head)) --d_ffn $neurons --context $context --batch_rows $rows"
}

study() {  # FOLDER SEED LABEL DENSITIES FLAGS...
  local folder=$1 name=${1##*/} seed=$2 label=$3 densities=$4 tokens=400000 rank=64
  shift 4
  if [ "$size" != 14m ]; then tokens=250000 rank=128; fi
  "$python" -m benchmarks.texts run --model "$folder" --training self --seed "$seed" --data "$data" \
    --tokens "$(pick 30000 600)" --cache "$work/text" --calibrate.cascade=null --trainer.accelerator="$(pick gpu cpu)" \
    --text.sample.tokens="$(pick $tokens 24000)" --mlp.rank="$(pick $rank 8)" --batch-tokens "$(pick 8192 600)" \
    $(pick "" "--mlp.steps=10 --heads.steps=10 --calibrate.sensitivity_tokens=1024") --densities "$densities" \
    --label "$label" --work "$work/runs-$name" --output "$work/$name-$seed$label.csv" "$@" >> "$out/$name.log" 2>&1
}

one() {  # NUMBER FAMILY [SEED]: a model from pretraining on, with predictors of that seed or of all
  local name=$2-$size folder=$work/${3:-0}/$2-$size seed neurons=0.05/1,0.08/1,0.1/1,0.15/1,0.2/1,0.3/1,0.5/1,0.7/1
  local alone="--heads.enabled=false --calibrate.head_density=1.0"
  if [ -z "$try" ]; then export CUDA_VISIBLE_DEVICES=$(($1 % gpus)); fi
  mkdir -p "$folder"
  cp checkpoints/opt-mini/tokenizer.json checkpoints/opt-mini/tokenizer_config.json "$folder"
  "$python" -m dejavu_train.extras.pretrain --output "$folder" --family "$2" $(shape "$2") --seed "${3:-0}" \
    --text $(pick "$(ls "$data"/train_*)" "$data/books.jsonl") \
    --heldout $(pick "$data/books.jsonl $data/docs.jsonl $data/general.jsonl" "$data/licences.jsonl") \
    --steps "$(pick "${STEPS:-2000}" 3)" --seconds "$(pick "${SECONDS_EACH:-180}" 60)" --warmup_steps 100 \
    --learning_rate "$([ "$size" = 14m ] && echo 3e-3 || echo 2e-3)" --device "$(pick cuda cpu)" \
    --compile "$([ -z "$try" ] && [ "$size" != 50m ] && echo true || echo false)" \
    >> "$out/$name.log" 2>&1 || { tail -n 3 "$out/$name.log"; return 1; }
  # Of both families transformers writes the text: no engine has Mamba layers, and one has no more than 32 rows.
  if [ -n "${3:-}" ]; then study "$folder" "$3" "" 0.05/1,0.1/1,0.2/1,0.5/1,0.7/1 $alone --text.sample.batch_size=256; return; fi
  for seed in $seeds; do study "$folder" "$seed" "" "$neurons,0.2/0.85,1/0.85,1/0.5,0.7/0.5"; done
  # Heads are left alone: the predictors of neurons read what stands half a layer earlier.
  study "$folder" 0 lookahead "$neurons" --mlp.lookahead=1 $alone
}
export -f one study shape

for family in $models; do
  if [ "$size" = 50m ]; then printf "$family %s\n" $seeds; else echo "$family"; fi
done | nl -w1 -s' ' | xargs -P "$(pick "${JOBS:-$gpus}" 1)" -L 1 bash -c 'one "$@"' bash
awk 'FNR > 1 || NR == 1' "$work"/*-"$size"-*.csv > "$out/rows.csv"
for json in "$work"/*/*-"$size"/pretraining.json; do
  "$python" -c "import json, sys; print(json.dumps(json.load(open(sys.argv[1]))))" "$json"
done > "$out/models.jsonl"
wc -l "$out/rows.csv" "$out/models.jsonl"
