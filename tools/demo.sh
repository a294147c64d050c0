#!/usr/bin/env bash
# `make demo`: convert, verify, reshard and inspect a small checkpoint with a real architecture.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
work=$1
rm -rf "$work"
mkdir -p "$work"

run() {
    printf '\n$ %s\n' "$*"
    "$@"
}

python "$here/demo_checkpoint.py" "$work/model"
cd "$work"
run ckptx convert to-dcp model model-dcp
run ckptx verify model model-dcp
run ckptx -q convert to-hf model-dcp model-back
run diff -r model model-back --exclude ckptx.json
printf '# The converted files are equal to the original files, byte for byte.\n'
run ckptx reshard model-dcp model-tp2-pp2 --tp 2 --pp 2
run ckptx inspect model-tp2-pp2 --ranks
run ckptx verify model model-tp2-pp2 --run --tp 2
