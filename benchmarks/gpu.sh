#!/usr/bin/env bash
# The rows and the tests that want a GPU, part by part: bash benchmarks/gpu.sh OUTPUT_FOLDER PART...
#   kernels      all tests of kernels and engines, on every GPU that is there
#   sanitizer    compute-sanitizer over kernels with an atomic, a ticket or a queue of their own
#   exact        exact.csv: steps that read all rows, leave silent neurons out, and ask predictors, and zeros.csv
#   decode       decode.csv and decode_families.csv: steps by prompt, rows and family, fp16 and 4 bits
#   first-token  first_token.csv: prompts of many lengths, beside transformers
#   lossless     lossless_gpu.csv: true shapes with a forced acceptance, and opt-mini's texts
#   serve        serve_speed.csv: the server beside its engine, of opt-mini and of SHAPES. serve_prompts.jsonl: of SHAPES
#   vllm         vllm_ops.csv: linear maps of the plug-in, dense, zeroskip and dejavu, 1 to 64 tokens
#   ranks        tensor_parallel.csv: GPUS (4) GPUs together
# A step has LIMIT (1800) seconds. OUTPUT_FOLDER gets the rows, a log of each step, and steps.csv: name, exit code, seconds.
# TRY=1 runs what a CPU can, on tiny sizes.
set -u
out=$(realpath -m "$1")
shift
try=${TRY:-} python=${PYTHON:-python3} limit=${LIMIT:-1800} shapes=${SHAPES:-"1.3b 6.7b"} gpus=${GPUS:-4}
work=${WORK:-$(mktemp -d)}
export PYTHONPATH=.:${PYTHONPATH:-} PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 OMP_WAIT_POLICY=PASSIVE OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}
mkdir -p "$out"

step() {  # NAME COMMAND...
  local name=$1 began=$SECONDS code
  shift
  timeout -k 5 "$limit" "$@" > "$out/$name.log" 2>&1
  code=$?
  echo "$name,$code,$((SECONDS - began))" | tee -a "$out/steps.csv"
  tail -n 3 "$out/$name.log"
}

bench() {  # NAME MODULE ARGUMENTS...
  local name=$1 module=$2
  shift 2
  step "$name" "$python" -m "benchmarks.$module" "$@"
}

part() {
  case $1 in
    kernels) step tests "$python" -m pytest -q -rf -p no:cacheprovider tests/kernels tests/engine ;;
    sanitizer)
      local tool
      for tool in memcheck racecheck; do
        PYTORCH_NO_CUDA_MEMORY_CACHING=1 step "$tool" compute-sanitizer --tool "$tool" --error-exitcode 9 \
          --target-processes all "$python" -m pytest -q -x -p no:cacheprovider -p no:xdist \
          tests/kernels/stages/test_listed_int4.py tests/kernels/stages/test_mlp_owned.py \
          tests/kernels/mlp/test_int4_fc2.py tests/kernels/dense/test_int4_batch.py \
          tests/kernels/attention/test_int4_qkv.py tests/kernels/verify
      done ;;
    exact)
      local all="engine=dense,exact,sparse head_density=1.0" packed="weights=int4 predictors=int4"
      bench exact decode --models 1.3b 6.7b 30b 66b --out "$out/exact.csv" --cells "$all" "$all $packed screen=True"
      bench exact-families decode --models afm-4.5b prosparse-7b --out "$out/exact.csv" --cells "$all" \
        "$all $packed lm_head=int4"
      bench exact-shares decode --models 6.7b --active-shares 0.02 0.06 0.12 0.3 --of-active 1.7 --out "$out/exact.csv" \
        --cells "engine=exact,sparse head_density=1.0"
      bench zeros zeros --out "$out/zeros.csv" ;;
    decode)
      bench decode decode --models 6.7b 66b --out "$out/decode.csv"
      bench families decode --models afm-4.5b prosparse-7b minitron-8b nemotron-4-15b --out "$out/decode_families.csv" ;;
    first-token) bench first-token first_token --models 6.7b 30b --formats fp16 int4 --rivals --out "$out/first_token.csv" ;;
    lossless)
      local shape
      for shape in $shapes; do bench "forced-$shape" lossless forced --device cuda --shape "$shape" --out "$out/lossless_gpu.csv"; done
      bench speed lossless speed --device cuda --out "$out/lossless_gpu.csv" ;;
    serve)
      local shape model device=cuda
      if [ -n "$try" ]; then device=cpu shapes=""; fi
      bench serve serve speed --device "$device" --turns 3 --out "$out/serve_speed.csv"
      for shape in $shapes; do
        model=$work/opt-$shape
        bench "write-$shape" random_folder "$shape" "$model"
        bench "serve-$shape" serve speed --device "$device" --model "$model" --bundle "$model/predictors" --no-rival \
          --out "$out/serve_speed.csv"
        bench "prompts-$shape" serve_prompts --device "$device" --model "$model" --bundle "$model/predictors" --new 600 \
          --chat 1000 --out "$out/serve_prompts.jsonl"
      done ;;
    vllm) PYTHONPATH=packages/dejavu-vllm:$PYTHONPATH bench vllm vllm_ops --out "$out/vllm_ops.csv" ;;
    ranks)
      step ranks "$python" -m torch.distributed.run --standalone --nproc-per-node "$gpus" -m benchmarks.tensor_parallel \
        --out "$out/tensor_parallel.csv" --models 6.7b 66b --cells goals ${try:+--rehearse} ;;
    *) echo "error: there is no part $1; see the head of benchmarks/gpu.sh" >&2; exit 2 ;;
  esac
}

for each in "$@"; do part "$each"; done
