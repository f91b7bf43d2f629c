#!/usr/bin/env bash
# The kernels for 4-bit weights on one GPU, in less than ten minutes: their GPU tests, then rows of int4_rows.csv.
#   bash benchmarks/int4.sh [OUTPUT_FOLDER]      default: benchmarks/results
# What the tests say lies in OUTPUT_FOLDER/int4_tests.log; a failure there does not keep the benchmark from running.
set -u
export PYTHONPATH=${PYTHONPATH:-}:. PYTHONUNBUFFERED=1
out=${1:-benchmarks/results}
mkdir -p "$out"
python3 -m pytest -q -m gpu -n 8 --timeout 200 tests/kernels/common/test_int4.py tests/kernels/common/test_int4_tiles.py tests/kernels/dense/test_int4_dense.py \
  tests/kernels/dense/test_int4_batch.py tests/kernels/mlp/test_int4_fc2.py tests/kernels/mlp/test_int4_mlp.py tests/kernels/mlp/test_nibbles.py tests/kernels/attention/test_int4_projection.py tests/kernels/attention/test_int4_qkv.py \
  > "$out/int4_tests.log" 2>&1
failed=$?
tail -n 15 "$out/int4_tests.log"
echo "tests done after $SECONDS s, exit code $failed"
for op in heads out mlp fc2 rows qkv predictor lm-head; do  # a process each: what one breaks, the others do not miss
  python3 benchmarks/int4_rows.py --ops "$op" --csv "$out/int4_rows.csv" --seconds $((390 - SECONDS))
done
for widths in "9216 4096" "7168 12288"; do  # what is unknown first: 200 s in all
  python3 benchmarks/int4_rows.py --sweep --d $widths --ops heads out rows mlp --seconds $((590 - SECONDS))
done | tee "$out/int4_sweep.txt"
exit "$failed"
