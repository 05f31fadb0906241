#!/usr/bin/env bash
# What to run first when there is a GPU, for an hour or less. See docs/guides/gpus.md.
#
#   prepare              with a network, no GPU: builds the kit in out/gpu-kit
#   run [PART..]         on the GPU machine: runs parts, most valuable first, into ${OUT:-out/gpu}
#   report FOLDER..      makes one report of several runs
#
# `run --rehearse` runs every part at a tiny size on CPUs. TORCH_PYTHON names the Python that has
# PyTorch, if it is not python3.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONUNBUFFERED=1

case "${1:-}" in
    prepare)
        shift
        exec python3 "$root/scripts/gpu_prepare.py" "$@"
        ;;
    run | report)
        exec python3 "$root/benchmarks/gpu.py" "$@"
        ;;
    *)
        sed -n '2,9s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
        exit 2
        ;;
esac
