#!/bin/sh
# An empty environment, command by command: from the two wheels to a first text.
#
#     make wheels && sh examples/from_wheels.sh build/wheels /tmp/empty
#
# PYTHON=python3.12      makes the environment
# INDEX=URL              another package index
# FIND_LINKS=FOLDER      wheels on this machine alone, without a network
#
# Every command is printed before it runs, with the seconds since the first.
set -eu
wheels=$(cd "$1" && pwd)
folder=$2
begun=$(date +%s)
options="${INDEX:+--index-url $INDEX} ${FIND_LINKS:+--no-index --find-links $FIND_LINKS}"
unset PYTHONPATH

say() {
    echo "$(($(date +%s) - begun)) s: $*"
    "$@"
}

test ! -e "$folder" || { echo "$folder exists; give a folder that is not there" >&2; exit 2; }
say "${PYTHON:-python3}" -m venv "$folder"
# shellcheck disable=SC2086  # options are words
say "$folder/bin/pip" install --quiet $options "$wheels"/dejavu_train-*.whl "$wheels"/dejavu_opt_mini-*.whl
cd "$folder"
say bin/dejavu infer --bundle checkpoints/opt-mini/bundle --generate "The decoder reads" --tokens 0 --timing false
say bin/pip list --format freeze
echo "$(($(date +%s) - begun)) s: done"
