#!/usr/bin/env bash
# All rows of the evaluation that need a GPU, in one tar: bash benchmarks/eval_gpu.sh FOLDER BUNDLE OUT
# FOLDER holds tasks/ and wikitext2/, BUNDLE is opt-mini's. MODEL2 and BUNDLE2 name a second model, for instance the
# 100M one. At most 15 minutes of one H200 (BUDGET seconds):
# a step that finds no time left fails. DEVICE=cpu TRY=1 runs it on a CPU with tiny limits, to try it.
set -u
folder=$1 bundle=$2 out=$3
device=${DEVICE:-cuda} try=${TRY:-} python=${PYTHON:-python3}
export PYTHONPATH=${PYTHONPATH:-}:. OMP_WAIT_POLICY=PASSIVE
mkdir -p "$out"
began=$(date +%s)
pick() { if [ -n "$try" ]; then echo "$2"; else echo "$1"; fi; }

step() {  # NAME SECONDS COMMAND...: goes on after a failure, which the tar shows
  local name=$1 limit=$2
  shift 2
  local at=$(date +%s)
  local left=$((${BUDGET:-900} - at + began))
  timeout "$((limit < left ? limit : left > 1 ? left : 1))" "$@" > "$out/$name.log" 2>&1
  echo "$name,$?,$(($(date +%s) - at))" | tee -a "$out/steps.csv"
}

tasks() {  # MODEL BUNDLE
  echo --config configs/eval/opt-mini.yaml --folder "$folder" --model "$1" --bundle "$2" --device "$device"
}

engine=$(pick triton gather)
small=$(pick "[cb,copa,lambada,openbookqa,piqa,rte,winogrande,hellaswag]" "[copa]")
mini=$(tasks checkpoints/opt-mini "$bundle")
[ -z "$try" ] && step tests 120 "$python" -m pytest -q -m gpu tests/evaluation/test_lm_eval_gpu.py
for dtype in $(pick "float32 float16" float32); do
  step "engine-$dtype" 150 "$python" -m benchmarks.tasks engine $mini --tasks "$small" --shots 0 --texts '[]' \
    --limit "$(pick 110 1)" --backend "$engine" --dtype "$dtype"
done
step near-ties 120 "$python" -m benchmarks.near_ties $mini --tasks "$small" --shots 0 --texts '[]' --limit "$(pick 110 1)"
step until 200 "$python" -m benchmarks.until --shape "$(pick 2.7b tiny)" --device "$device" \
  --new_tokens "$(pick 64 4)" --prompt "$(pick 128 16)" --batches 1 "$(pick 16 2)"
step tasks-0 150 "$python" -m benchmarks.tasks $mini --tasks "$small" --shots 0 --texts '[]' --limit "$(pick 2000 1)"
step tasks-5 200 "$python" -m benchmarks.tasks $mini --tasks "$small" --shots 5 --texts '[]' --limit "$(pick 500 1)"
if [ -n "${MODEL2:-}" ]; then
  second=$(tasks "$MODEL2" "$BUNDLE2")
  step engine-second 200 "$python" -m benchmarks.tasks engine $second --tasks "$small" --shots 0 --texts '[]' \
    --limit "$(pick 110 1)" --backend "$engine" --dtype float32
  step tasks-second 200 "$python" -m benchmarks.tasks $second --tasks "$small" --shots 0 --texts '[]' \
    --limit "$(pick 1000 1)" --backend "$engine"
fi
step paper-0 200 "$python" -m benchmarks.tasks paper --config configs/eval/paper.yaml --folder "$folder" \
  --bundle "$bundle" --device "$device" --output "$out/paper" --tasks "$small" --shots 0 --texts '[]' \
  --limit "$(pick 200 1)" --tables "$(pick '[table4,fig7,structures]' '[table4]')"
if [ -z "$try" ]; then
  step wikitext 60 "$python" -m benchmarks.tasks $mini --tasks '[]'
  step paper-text 150 "$python" -m benchmarks.tasks paper --config configs/eval/paper.yaml --folder "$folder" \
    --bundle "$bundle" --device "$device" --output "$out/paper-text" --tasks '[]' --limit 20
  step cost 60 "$python" -m dejavu_train.evaluation.observe --config configs/observe/opt-mini.yaml --bundle null \
    --parts cost --output "$out" --device "$device"
  step generation 150 "$python" -m dejavu_train.evaluation.generation --config configs/generation/opt-mini.yaml \
    --bundle "$bundle" --output "$out" --prompts 128 --new_tokens 128 --device "$device"
fi
cp benchmarks/results/{tasks,task_engine,near_ties,until,paper}.csv "$out" 2> /dev/null
tar -cf "$out.tar" -C "$(dirname "$out")" "$(basename "$out")"
echo "$(($(date +%s) - began)) s, $out.tar"
