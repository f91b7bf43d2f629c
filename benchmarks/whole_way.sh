#!/usr/bin/env bash
# From fp16 shards to decoding with 4-bit weights, each step a command of a user: bash benchmarks/whole_way.sh OUTPUT_FOLDER
# A random model of SHAPE (6.7b) is written in shards and quantised (QUANTIZER: rtn); the quantised model writes 20,000
# tokens, on which predictors are trained for a few steps and calibrated, JOBS processes sharing the layers; infer.py times
# decoding, dense and sparse. OUTPUT_FOLDER gets steps.csv (seconds, peak memory of the largest process and of the GPU, in
# GB) and logs as they come, OUTPUT_FOLDER.tar all of it, renewed after each step. At most LIMIT seconds. TRY=1 does it
# with a tiny shape on a CPU.
set -u
out=$1 try=${TRY:-}
pick() { if [ -n "$try" ]; then echo "$2"; else echo "$1"; fi; }
work=${WORK:-$(pick /dev/shm/whole_way /tmp/whole_way)} python=${PYTHON:-python3} limit=${LIMIT:-300}
shape=${SHAPE:-$(pick 6.7b tiny)} layers=$(pick "${LAYERS:-32}" 2) jobs=$(pick "${JOBS:-4}" 2) device=$(pick cuda cpu)
export PYTHONPATH=${PYTHONPATH:-}:. PYTHONUNBUFFERED=1 OMP_NUM_THREADS=$(pick 4 1) OMP_WAIT_POLICY=PASSIVE
export HF_HUB_DISABLE_PROGRESS_BARS=1
mkdir -p "$out" "$work"
trap 'rm -rf "$work"' EXIT

step() {  # NAME COMMAND...
  local name=$1 at=$SECONDS poll=""
  shift
  if [ -z "$try" ]; then
    nvidia-smi -i "${CUDA_VISIBLE_DEVICES:-0}" --query-gpu=memory.used --format=csv,noheader,nounits -lms 500 > "$out/$name.gpu" & poll=$!
  fi
  "$python" - $((limit > SECONDS ? limit - SECONDS : 1)) "$@" > "$out/$name.log" 2>&1 <<'PY'
import resource, subprocess, sys
try:
    code = subprocess.run(sys.argv[2:], timeout=float(sys.argv[1])).returncode
except subprocess.TimeoutExpired:
    code = 124
print("peak", round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / 1e9, 2))
sys.exit(code)
PY
  local code=$? gpu=""
  if [ -n "$poll" ]; then
    kill "$poll"
    gpu=$(sort -n "$out/$name.gpu" | tail -n 1 | awk '{print $1 * 1.048576 / 1000}')
  fi
  [ -e "$out/steps.csv" ] || echo step,exit,seconds,main_gb,gpu_gb > "$out/steps.csv"
  echo "$name,$code,$((SECONDS - at)),$(awk '$1 == "peak" {print $2}' "$out/$name.log"),$gpu" | tee -a "$out/steps.csv"
  if [ "$code" != 0 ]; then tail -n 5 "$out/$name.log" >&2; fi
  tar -C "$(dirname "$out")" -cf "$out.$name" "$(basename "$out")"
  [ $? -le 1 ] && mv "$out.$name" "$out.tar"  # 1: a log grew meanwhile
  return "$code"
}

step write "$python" -m benchmarks.random_opt --shape "$shape" --output "$work/fp16" --device "$device" || exit 1
step quantise "$python" -m dejavu_train.quantize --model "$work/fp16" --output "$work/int4" \
  --quantizer "${QUANTIZER:-rtn}" --device "$device" --text.cache="$work/text" || exit 1
rm -rf "$work/fp16"
train="train.py --config=configs/opt-6.7b.yaml --model=$work/int4 --output=$work/run --text.cache=$work/text
  --collect.window=512 --collect.train_tokens=$(pick 20000 5000) --collect.val_tokens=$(pick 800 512)
  --collect.calibration_tokens=$(pick 1600 1024) --collect.device=$device --data.num_workers=0 --data.batch_size=512
  --mlp.rank=$(pick 256 8) --heads.rank=$(pick 32 4) --mlp.steps=$(pick 50 5) --heads.steps=$(pick 50 5)
  --calibrate.sensitivity_tokens=0 --trainer.logger=false --trainer.accelerator=$(pick gpu cpu)
  --trainer.precision=$(pick bf16-mixed 32)"
pids="" each=$((layers / jobs))
step train-0 "$python" $train --layers="0-$((each - 1))" &
pids=$!
for job in $(seq 1 $((jobs - 1))); do
  last=$((job == jobs - 1 ? layers - 1 : (job + 1) * each - 1))
  step "train-$job" "$python" $train --layers="$((job * each))-$last" &
  pids="$pids $!"
done
wait $pids
test -f "$work/run/bundle/bundle.json" || exit 1
rm -rf "$work/run/activations"
cat docs/*.md > "$work/prompts.txt"  # infer.py's default texts take longer to find than this model to decode
step decode "$python" infer.py --model "$work/int4" --bundle "$work/run/bundle" --output "$out/infer" --device "$device" \
  --text "$work/prompts.txt" --tokens 0 --timing_backends "$(pick '[dense-engine,triton]' '[dense,gather]')" --timing_mlp_density 0.1 \
  --timing_head_density 0.85 --prompt "$(pick 128 16)" --new_tokens "$(pick 128 8)" --text_cache "$work/text"
sed -n '/^backend/,/^$/p' "$out/decode.log"
echo "$SECONDS s"
