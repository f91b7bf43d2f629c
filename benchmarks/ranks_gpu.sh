#!/usr/bin/env bash
# What several GPUs of one host have to show, one part a call, each within LIMIT (570) seconds on four GPUs:
#   bash benchmarks/ranks_gpu.sh OUTPUT_FOLDER apart      side by side: a 30B by layers (GPU 0), a plan's run (GPU 1), and
#                                                         an Arcee shape on two beside transformers' tp_plan (GPUs 2, 3)
#   bash benchmarks/ranks_gpu.sh OUTPUT_FOLDER together   tokens against one GPU's, 66B beside transformers' device map,
#                                                         predictors in four workers, 175B reckoned from 2 and 6 layers
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

plan() {  # NAME SECONDS ARGUMENTS...
  local name=$1 seconds=$2
  shift 2
  step "$name" "$seconds" "$python" -m benchmarks.plan_run --gpu "$gpu" --folder "$work/$name" \
    --results "$out/plan.csv" $(pick "--shape 6.7b --layers 8 --tokens 40000" "--shape tiny --tokens 4000") "$@"
}

case $part in
apart)
  CUDA_VISIBLE_DEVICES=0 step by-layers 400 "$python" -m benchmarks.by_layers --places "$work" \
    --results "$out/by_layers.csv" --stages collect $(pick "--shape 30b --tokens 32768" "--shape tiny --tokens 2000 --device cpu") &
  CUDA_VISIBLE_DEVICES=1 plan plan-alone 400 &
  CUDA_VISIBLE_DEVICES=2,3 ranks arcee 400 2 --models afm-4.5b \
    --cells "engine=dense" "engine=sparse head_density=1.0 site=1" --rivals --rival-seconds 240 &
  wait
  ;;
together)
  ranks check 150 4 --check --models 66b --cells "engine=dense,sparse" --layers 2 6 --rivals --rival-seconds 120
  plan plan-together 150 --workers "$(pick 4 2)"
  ranks 175b "$(left 10)" 4 --models 175b --cells goals --layers 2 6
  ;;
*)
  echo "error: the part must be apart or together, got $part" >&2
  exit 2
  ;;
esac
tar -cJf "$out/logs.tar.xz" -C "$work" logs
rm -rf "$work"
