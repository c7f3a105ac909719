#!/usr/bin/env bash
# Slurm: one deployment on two nodes, as one job of two components.
#
#     sbatch docs/deploy/slurm.sh --model-path /models/model
#
# The first component runs the attention ranks and takes requests at port 30000, the second runs the FFN
# ranks.  What is given to the script goes to both commands.  Change the GPUs here and the ranks below.
#SBATCH --job-name=sglang-afd
#SBATCH --time=24:00:00
#SBATCH --nodes=1 --ntasks=1 --gpus-per-node=6 --exclusive
#SBATCH hetjob
#SBATCH --nodes=1 --ntasks=1 --gpus-per-node=2 --exclusive
set -euo pipefail

ranks=(--afd-attention-ranks 6 --afd-ffn-ranks 2)
first=$(scontrol show hostnames "${SLURM_JOB_NODELIST_HET_GROUP_0}" | head -n 1)
meeting=(--nnodes 2 --dist-init-addr "${first}:25000")
serve=(python -m sglang_afd.launch_server "${ranks[@]}" "${meeting[@]}" "$@")

# Either command's end ends the other, and with it the job; --kill-on-bad-exit passes a failure on.
srun --het-group=0 --kill-on-bad-exit=1 \
    "${serve[@]}" --afd-role attention --node-rank 0 --host 0.0.0.0 --port 30000 &
attention=$!
srun --het-group=1 --kill-on-bad-exit=1 "${serve[@]}" --afd-role ffn --node-rank 1 &
ffn=$!
trap 'kill -TERM "${attention}"' TERM INT
status=0
wait "${attention}" || status=$?
wait "${ffn}" || status=$((status ? status : $?))
exit "${status}"
