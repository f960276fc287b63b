#!/usr/bin/env bash
# CI gate: fail the build when the values of a model no longer match a stored baseline.
#
#     04_ci_gate.sh MODEL BASELINE WORKDIR
#
# The first call records BASELINE. Later calls run the model on the same tokens, compare the two runs and write
# WORKDIR/diff.html. Exit codes: 0 same, 1 differs, 2 usage error, 3 nothing to compare.
set -euo pipefail
if [ $# -ne 3 ]; then
    echo "usage: $0 MODEL BASELINE WORKDIR (with tapscope on the PATH: . .venv/bin/activate)" >&2
    exit 2
fi
model=$1 baseline=$2 work=$3

if [ ! -e "$baseline" ]; then
    tapscope dump "$model" -o "$baseline" --prompt 'def main():' --max-new-tokens 4
    exit 0
fi
tapscope dump "$model" -o "$work/candidate" --tokens-from "$baseline" --force
tapscope diff "$baseline" "$work/candidate" --html "$work/diff.html" | tail -4
