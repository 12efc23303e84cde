#!/bin/bash
# The same line on every node, in any order:
#   CONFIG=run.yaml NNODES=2 MAIN=node-0 bash docs/launch/torchrun.sh [options of `lightning-moe fit`]
# MAIN: the name or address of one of the nodes, on the network that all of them share.

set -euo pipefail

CONFIG="${CONFIG:?a YAML file, as in CONFIG=run.yaml}"
NNODES="${NNODES:-1}"
GPUS="${GPUS:-8}"

# Without --max-restarts a rank that fails ends the run; with it, torchrun starts all ranks again: give --ckpt_path.
torchrun --nnodes "$NNODES" --nproc-per-node "$GPUS" \
  --rdzv-backend c10d --rdzv-endpoint "${MAIN:-localhost}:${PORT:-29400}" --rdzv-id "${JOB:-moe}" \
  -m lightning_moe_strategy fit --config "$CONFIG" \
  --trainer.num_nodes "$NNODES" --trainer.devices "$GPUS" "$@"
