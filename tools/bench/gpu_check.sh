#!/bin/sh
# What one GPU shows in eight minutes. Builds nothing; needs torch with CUDA and the packages of
# pyproject.toml, and pytest for the first stage.
#
#   OUT=results tools/bench/gpu_check.sh
#
# PYTHON names another interpreter. Status 0: all that was seen is right; 1: something is not, or a
# stage crashed; 2: there is no GPU here.
set -eu
export OUT="${OUT:-runs/gpu-check}"
exec "${PYTHON:-python3}" "$(dirname "$0")/gpu_check.py" "$OUT"
