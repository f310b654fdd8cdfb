#!/usr/bin/env bash
# Train a job on several machines: torchrun on each of them, started over ssh.
#
#     HOSTS="node0 node1" RANKS=4 examples/clusters/torchrun_ssh.sh job.py --strategy ddp
#
# The machines see this folder under the same path (a shared disk, or a copy), and have the same Python environment.
#
#   HOSTS        the machines; rank 0 is on the first, which makes and writes the run's folder
#   RANKS        processes on each: one per GPU (default: 1)
#   MASTER_ADDR  the first machine's address in the cluster's network (default: its name as it stands in HOSTS).
#                Give it where that name is 127.0.1.1 on the machine itself, as Debian and Ubuntu set it up
#   MASTER_PORT  a free port there (default: 29500)
#   PYTHON       the Python to run on each (default: python3)
set -euo pipefail

hosts=(${HOSTS:?the machines, for example HOSTS="node0 node1"})
words=$(printf ' %q' "$@")

started=()
for node in "${!hosts[@]}"; do
  # -tt: where this script is stopped, torchrun hears of it on every machine.
  ssh -tt "${hosts[node]}" "cd $(printf %q "$PWD") && exec ${PYTHON:-python3} -m torch.distributed.run \
    --nnodes ${#hosts[@]} --nproc-per-node ${RANKS:-1} --node-rank $node \
    --master-addr ${MASTER_ADDR:-${hosts[0]}} --master-port ${MASTER_PORT:-29500} \
    -m lockstep train$words" </dev/null &
  started+=($!)
done
trap 'kill "${started[@]}" 2>/dev/null || true' INT TERM

code=0
for process in "${started[@]}"; do
  wait "$process" || code=$?
done
exit "$code"
