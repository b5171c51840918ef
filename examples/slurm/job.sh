#!/bin/bash
# A job that can be stopped at any time and goes on where it was:
#   zrpc secret $HOME/mesh.secret    (once, if the job has more than one host)
#   sbatch job.sh
#SBATCH --nodes 2
#SBATCH --ntasks 4
#SBATCH --requeue
#SBATCH --open-mode append
#SBATCH --output train.out

if [ -e "$HOME/mesh.secret" ]; then export ZRPC_SECRET_FILE=$HOME/mesh.secret; fi
srun python train.py checkpoint.pt "$@"
