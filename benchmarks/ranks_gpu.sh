#!/usr/bin/env bash
# What several GPUs of one host have to show, one part a call, each within LIMIT (570) seconds:
#   bash benchmarks/ranks_gpu.sh OUTPUT_FOLDER layers     a whole 30B by layers on one GPU, beside other work on other GPUs
#   bash benchmarks/ranks_gpu.sh OUTPUT_FOLDER together   four GPUs: tokens against one GPU's, predictors in four workers
#                                                         and in one, what a callback costs, 175B reckoned from 2 and 6 layers
#   bash benchmarks/ranks_gpu.sh OUTPUT_FOLDER rivals     four GPUs, side by side: an Arcee shape on two beside transformers'
#                                                         tp_plan, and OPT-66B on two beside its device map
#   TRY=1 bash benchmarks/ranks_gpu.sh OUTPUT_FOLDER PART   tiny shapes on two CPUs
# GPU (H200) is the card as --plan names it. OUTPUT_FOLDER gets by_layers.csv, plan.csv, tensor_parallel.csv, steps.csv
# and logs.tar.xz. Rows come as they are made, and what is cut off leaves those before it.
set -u
out=$(realpath -m "$1") part=$2
. "$(dirname "$0")/steps.sh"
work=${WORK:-$(pick /dev/shm/ranks_gpu /tmp/ranks_gpu)}
logs=$work/logs gpu=${GPU:-H200}
export PYTHONPATH=.:${PYTHONPATH:-} PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TMPDIR=$work
mkdir -p "$out" "$logs"
keep_logs() { :; }  # steps run side by side: logs are packed at the end

ranks() {  # NAME SECONDS GPUS ARGUMENTS...
  local name=$1 seconds=$2 world=$3
  shift 3
  step "$name" "$seconds" "$python" -m torch.distributed.run --standalone --nproc-per-node "$(pick "$world" 2)" \
    -m benchmarks.tensor_parallel --out "$out/tensor_parallel.csv" "$@" ${try:+--rehearse}
}

case $part in
layers)
  step by-layers "$limit" "$python" -m benchmarks.by_layers --places "$work" --results "$out/by_layers.csv" \
    --stages collect $(pick "--shape 30b --tokens 32768" "--shape tiny --tokens 2000 --device cpu")
  ;;
together)
  ranks check 150 4 --check
  step plan 330 "$python" -m benchmarks.plan_run --gpu "$gpu" --folder "$work/plan" --results "$out/plan.csv" \
    $(pick "--shape 6.7b --layers 8 --tokens 40000 --workers 4" "--shape tiny --tokens 4000 --workers 2")
  ranks callback 60 4 --models afm-4.5b --callback
  ranks 175b "$(left 10)" 4 --models 175b --cells goals --layers 2 6
  ;;
rivals)
  CUDA_VISIBLE_DEVICES=0,1 ranks arcee "$limit" 2 --models afm-4.5b \
    --cells "engine=dense" "engine=sparse head_density=1.0 site=1" --rivals --rival-seconds 300 &
  CUDA_VISIBLE_DEVICES=2,3 ranks 66b "$limit" 2 --models 66b --cells "engine=dense,sparse" --layers 2 6 \
    --rivals --rival-seconds 200 &
  wait
  ;;
*)
  echo "error: the part must be layers, together or rivals, got $part" >&2
  exit 2
  ;;
esac
tar -cJf "$out/logs.tar.xz" -C "$work" logs
rm -rf "$work"
