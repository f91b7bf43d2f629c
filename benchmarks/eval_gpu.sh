#!/usr/bin/env bash
# All rows of the evaluation that need a GPU: bash benchmarks/eval_gpu.sh FOLDER BUNDLE OUT
#
# FOLDER holds tasks/, wikitext2/ and general_heldout.jsonl, BUNDLE is opt-mini's. MODEL2 and BUNDLE2 name a second
# model with its bundle, for instance the 100M one (DTYPE2 float32 or float16). GROUPS_RUN chooses of
#   tests engine              what was measured before; together 4 minutes
#   cost                      Tables 1 to 3 with times
#   second                    the second model: tasks through the engine and mask, LAMBADA at three shares of the heads
#   five texts paper generation lambada
# What reports times runs alone and first, the rest side by side, SLOTS at once, all in BUDGET seconds (480); the seconds
# in the latter's rows are no times. Rows are written as they come, to a folder a step; in the middle and at the end all
# of a kind are put together and OUT.tar is made. DEVICE=cpu TRY=1 tries it with tiny limits.
set -u
folder=$1 bundle=$2 out=$3
. "$(dirname "$0")/steps.sh"
device=${DEVICE:-cuda} budget=${BUDGET:-480}
limit=$((budget - 15)) logs=$out
groups=" ${GROUPS_RUN:-cost second five texts paper generation lambada} "
cores=$(nproc)
slots=${SLOTS:-$((cores > 16 ? 14 : cores > 4 ? cores - 3 : 1))}
export PYTHONPATH=${PYTHONPATH:-}:. OMP_WAIT_POLICY=PASSIVE OMP_NUM_THREADS=2 TOKENIZERS_PARALLELISM=false
mkdir -p "$out"
wanted() { [[ $groups == *" $1 "* ]]; }

pack() {
  local kind file
  for kind in tasks task_engine paper; do
    rm -f "$out/$kind.csv"
    for file in "$out"/*/"$kind.csv"; do
      [ -s "$file" ] || continue
      [ -s "$out/$kind.csv" ] || head -n 1 "$file" > "$out/$kind.csv"
      tail -n +2 "$file" >> "$out/$kind.csv"
    done
  done
  tar -cf "$out.tar" -C "$(dirname "$out")" "$(basename "$out")" 2> /dev/null
}

keep_logs() { :; }  # pack does, in the middle and at the end

alone() { DEJAVU_RESULTS=$out/$1 step "$@"; }  # a step whose rows go to a folder of its own

beside() {  # likewise, next to others
  while [ "$(jobs -rp | wc -l)" -ge $((slots + 1)) ]; do wait -n; done
  alone "$@" &
}

tasks() {  # MODEL BUNDLE DTYPE
  echo --config configs/eval/opt-mini.yaml --folder "$folder" --model "$1" --bundle "$2" --dtype "$3" --device "$device"
}

engine=$(pick triton gather)
all=$(pick "[cb,copa,lambada,openbookqa,piqa,rte,winogrande,hellaswag]" "[copa]")
mini=$(tasks checkpoints/opt-mini "$bundle" float32)
rows="$python -m benchmarks.tasks" record="$python -m papers.deja_vu.record"

# Alone: their times are reported.
if wanted tests; then
  [ -z "$try" ] && alone tests 120 "$python" -m pytest -q -m gpu tests/extras/test_lm_eval_gpu.py
fi
if wanted engine; then
  for dtype in $(pick "float32 float16" float32); do
    alone "engine-$dtype" 150 $rows engine $(tasks checkpoints/opt-mini "$bundle" "$dtype") --tasks "$all" --shots 0 \
      --text '[]' --limit "$(pick 110 1)" --backend "$engine"
  done
fi
wanted cost && alone cost 40 "$python" -m papers.deja_vu.observe --config papers/deja_vu/configs/observe.yaml \
  --bundle null --parts cost --output "$out/cost" --device "$device"
if wanted second && [ -n "${MODEL2:-}" ]; then
  second=$(tasks "$MODEL2" "$BUNDLE2" "${DTYPE2:-float32}")
  alone second-engine 100 $rows engine $second --tasks "$all" --shots 0 --text '[]' --limit "$(pick 110 1)" \
    --backend "$engine"
fi

# Side by side, what is long or decides most first.
(sleep $((budget / 2)) && pack) > /dev/null 2>&1 &
middle=$!
if wanted second && [ -n "${MODEL2:-}" ]; then
  for shots in 0 5; do
    beside "second-tasks-$shots" 420 $rows $second --tasks "$all" --shots "$shots" --text '[]' \
      --limit "$(pick $((shots ? 500 : 2000)) 1)"
  done
fi
wanted five && beside tasks-5 420 $rows $mini --tasks "$all" --shots 5 --text '[]' --limit "$(pick 2000 1)"
if wanted paper; then
  for shots in 0 5; do
    for tables in $(pick "fig7 table4,structures" table4); do
      beside "paper-$shots-${tables/,/-}" 420 $record --config papers/deja_vu/configs/tables.yaml --folder "$folder" \
        --bundle "$bundle" --device "$device" --tasks "$all" --shots "$shots" --text '[]' \
        --limit "$(pick 200 1)" --tables "[$tables]" --output "$out/paper-$shots-${tables/,/-}"
    done
  done
fi
wanted generation && beside generation 420 "$python" -m dejavu_train.extras.generation \
  --config configs/generation/opt-mini.yaml --text "$folder/general_heldout.jsonl" --bundle "$bundle" --output "$out" --prompts "$(pick 128 2)" \
  --new_tokens "$(pick 128 8)" --device "$device" $(pick "" "--densities [0.1] --every [] --decodings [greedy]")
if wanted second && [ -n "${MODEL2:-}" ]; then
  for heads in $(pick "0.9 0.95 1.0" 0.9); do  # the bundle's own share is a row of second-tasks-0
    beside "second-lambada-$heads" 200 $rows $second --tasks '[lambada]' --shots 0 --text '[]' \
      --limit "$(pick 2000 1)" --head_density "$heads"
  done
  beside second-tasks-engine 300 $rows $second --tasks "$all" --shots 0 --text '[]' --limit "$(pick 300 1)" \
    --backend "$engine"
fi
if wanted texts; then
  for tables in $(pick "fig7 table4,structures" ""); do
    beside "paper-wikitext-${tables/,/-}" 420 $record --config papers/deja_vu/configs/tables.yaml --folder "$folder" \
      --bundle "$bundle" --device "$device" --tasks '[]' --shots 0 --tables "[$tables]" \
      --output "$out/paper-wikitext-${tables/,/-}"
  done
  for text in $(pick "wikitext prose" prose); do
    beside "$text" 300 $rows $mini --tasks '[]' --text "[$text]" --limit "$(pick null 1)"
  done
fi
if wanted lambada; then
  for heads in $(pick "0.9 0.95 1.0" 0.9); do
    beside "lambada-$heads" 200 $rows $mini --tasks '[lambada]' --shots 0 --text '[]' --limit "$(pick 2000 1)" \
      --head_density "$heads"
  done
fi
others=$(jobs -rp | grep -v "^$middle$")
[ -n "$others" ] && wait $others
kill "$middle" 2> /dev/null
pack
echo "$((SECONDS - began)) s, $out.tar"
