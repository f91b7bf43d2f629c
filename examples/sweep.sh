#!/bin/sh
# A sweep over rank and density on opt-mini: twelve experiments, one run of Weights & Biases each, and one picture.
#
#     sh examples/sweep.sh [FOLDER]
#
# Runs of one rank share a folder, so that a density is calibrated from predictors that are there. What was trained
# before is not trained again. It is small: few tokens, few steps, all heads.
set -e
folder=${1:-build/sweep}
runs=
for rank in 8 64; do
  for density in 0.05 0.1 0.15 0.2 0.3 0.4; do
    output=$folder/rank-$rank
    results=$folder/infer/rank-$rank-at-$density
    python train.py --config configs/opt-mini.yaml --output "$output" --bundle at-$density \
      --mlp.rank $rank --calibrate.mlp_density $density --calibrate.cascade null \
      --mlp.density 0.1 --mlp.steps 150 --mlp.validations 3 --heads.enabled false --calibrate.head_density 1.0 \
      --collect.train_tokens 30000 --collect.val_tokens 4000 --collect.calibration_tokens 8000 \
      --calibrate.sensitivity_tokens 512
    python infer.py --bundle "$output/at-$density" --output "$results" --text installed-docs --tokens 4000 \
      --selections predicted --sparse_from 0 --timing_backends cpu
    runs="$runs $results"
  done
done
python -m dejavu_train compare $runs --by mlp.rank --output "$folder/compared"
