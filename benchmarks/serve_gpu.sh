#!/usr/bin/env bash
# The server and pipeline() on one GPU, beside transformers.
#   bash benchmarks/serve_gpu.sh OUTPUT_FOLDER PART...     each of PARTS below, one after the other, within LIMIT (570) s
#   TRY=1 bash benchmarks/serve_gpu.sh OUTPUT_FOLDER       the server's part on a CPU, with opt-mini and a single turn
# Parts, with the seconds that each may take:
#   server (120 a model)    benchmarks.serve_speed: the server beside its engine alone, for opt-mini and for SHAPES
#   pipeline (120 a shape)  benchmarks.generate for SHAPES (1.3b 6.7b): pipeline() with all defaults beside transformers'
#   rival (150 a model)     the server again, in turns with `transformers serve`, for opt-mini and the first of SHAPES.
#                           With RIVAL (--continuous-batching), and without where that does not start
# OUTPUT_FOLDER gets serve_speed.csv, generate.jsonl, steps.csv (name, exit code, begin, end) and logs.tar.xz. Rows of a
# model that appears again are newer, and the table takes those. Models of random weights are written into WORK.
#
# On a machine without an index these packages travel as wheels, 7 MB for Linux and Python 3.12. pydantic-core and jiter
# are compiled for one version of Python, so the site-packages of another do not serve:
#   pip download --no-deps --only-binary=:all: --python-version 3.12 --implementation cp -c constraints.txt -d wheels \
#     --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
#     fastapi starlette uvicorn click h11 pydantic pydantic-core annotated-types typing-inspection typing-extensions \
#     annotated-doc anyio idna sniffio opentelemetry-api openai jiter httpx2 httpcore2 truststore httpx httpcore certifi \
#     jsonargparse docstring-parser typeshed-client
#   pip install --no-index --no-deps --target site wheels/*.whl && export PYTHONPATH=site      on that machine
set -u
out=$(realpath -m "$1")
shift
. "$(dirname "$0")/steps.sh"
parts=${*:-$(pick "server pipeline rival" server)} shapes=${SHAPES-$(pick "1.3b 6.7b" "")}
device=$(pick cuda cpu) rival=${RIVAL---continuous-batching}
work=${WORK:-$(pick /dev/shm/serve_gpu /tmp/serve_gpu)}
export PYTHONPATH=.:${PYTHONPATH:-} PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 OMP_WAIT_POLICY=PASSIVE OMP_NUM_THREADS=$(pick 4 1)
mkdir -p "$out" "$work/logs"

serve() {  # NAME SECONDS SHAPE OPTIONS...: of opt-mini, or of random weights of a shape, which are written once
  local name=$1 room=$2 shape=$3 model=checkpoints/opt-mini bundle=bundle
  shift 3
  if [ "$shape" != opt-mini ]; then
    model=$work/opt-$shape bundle=predictors
    if [ ! -e "$model/$bundle" ]; then step "write-$shape" 120 "$python" -m benchmarks.random_folder "$shape" "$model" || return; fi
  fi
  step "$name-$shape" "$room" "$python" -m benchmarks.serve_speed --model "$model" --bundle "$model/$bundle" \
    --device "$device" --out "$out/serve_speed.csv" "$@"
}

for part in $parts; do
  case $part in
    server)
      for shape in opt-mini $shapes; do serve server 120 "$shape" --turns "$(pick 7 1)" --no-rival; done ;;
    pipeline)
      for shape in $shapes; do step "pipeline-$shape" 120 "$python" -m benchmarks.generate --shape "$shape" --out "$out/generate.jsonl"; done ;;
    rival)
      for shape in opt-mini ${shapes%% *}; do
        if [ -n "$rival" ]; then serve rival 150 "$shape" --turns 3 --rival-options="$rival" && continue; fi
        serve rival-alone 150 "$shape" --turns "$(pick 3 1)"
      done ;;
    *) echo "no part $part: server, pipeline, rival" >&2; exit 2 ;;
  esac
done
