#!/usr/bin/env bash
# The rows of docs/results/texts/*.csv on one GPU: bash benchmarks/texts.sh mini|100m OUTPUT.csv
# Needs .data (python -m benchmarks.texts prepare); `100m` pretrains its model first. JOBS runs go side by side.
set -u
export out=$2 rows=$(mktemp -d) work=${WORK:-/dev/shm/texts}
export PYTHONPATH=${PYTHONPATH:-}:. PYTHONUNBUFFERED=1 OMP_NUM_THREADS=2 HF_HUB_DISABLE_PROGRESS_BARS=1
export common="--work $work --cache $work/text --trainer.accelerator=gpu"
file="--collect.train_tokens=325000 --collect.val_tokens=14800 --collect.calibration_tokens=29600"
file="$file --collect.windows_per_document=4"

one() {  # NUMBER FLAGS: one training run and its rows
  local number=$1
  shift
  python3 -m benchmarks.texts run $common "$@" --output "$rows/$number.csv" > "$rows/$number.log" 2>&1 ||
    { echo "run $number failed: $*"; tail -3 "$rows/$number.log"; } >&2
  grep -h "trained in" "$rows/$number.log" >&2
}
export -f one

mini() {
  cat <<EOF
--training self --label self-tuned --tune.steps=300 --tune.density=0.18
--training self --seed 2 --label self-tuned --tune.steps=300 --tune.density=0.18
--training self --yardsticks
--training docs $file
--training self --seed 1
--training self --seed 2
--training docs --seed 1 $file
--training docs --seed 2 $file
--training self --recipe original
--training self --label self-50k --text.sample.tokens=50000
--training self --recipe whitened-svd

EOF
}

hundred() {
  cat <<EOF
--training self
--training docs $file
--training self --recipe whitened-svd
--training self --seed 1
--training self --seed 2
EOF
}

case $1 in
mini) list=$(mini) ;;
100m)
  common="$common --model $work/opt-100m --mlp.rank=128 --text.sample.tokens=400000 --batch-tokens 8192"
  python3 -m dejavu_train.extras.pretrain --output "$work/opt-100m" --text .data/general_train.jsonl.xz \
    .data/train_docs.jsonl.xz --heldout .data/books.jsonl .data/docs.jsonl --d_model 768 --n_layers 12 --n_heads 12 \
    --d_ffn 3072 --context 512 --seconds "${PRETRAIN_SECONDS:-120}" >&2 || exit 1
  list=$(hundred)
  ;;
esac
echo "$list" | nl -w1 -s' ' | xargs -P "${JOBS:-6}" -L 1 bash -c 'one "$@"' bash
for csv in $(ls -v "$rows"/*.csv); do
  if [ -e "$out" ]; then tail -n +2 "$csv" >> "$out"; else cp "$csv" "$out"; fi
done
