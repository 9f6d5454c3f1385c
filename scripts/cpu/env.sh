# Source this to run Megatron's training loop without a GPU: the shim on PYTHONPATH, one thread a process.
cpu_dir=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root_dir=$(cd "$cpu_dir/../.." && pwd)
export PYTHONPATH="$cpu_dir:$root_dir${PYTHONPATH:+:$PYTHONPATH}"
export OMP_NUM_THREADS=1 CUDA_DEVICE_MAX_CONNECTIONS=1 TORCHDYNAMO_DISABLE=1 NO_VCS_VERSION=1 PYTHONWARNINGS=ignore
