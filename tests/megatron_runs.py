"""Run Megatron through the plugin in child processes and read what every rank saw."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import forked_ranks
import numpy as np
import torch

from scripts.environment import ROOT, cpu_environment, free_port

MODEL = """--num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --group-query-attention
--num-query-groups 2 --normalization RMSNorm --swiglu --position-embedding-type rope --disable-bias-linear
--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0"""
MACHINE = """--distributed-backend gloo --transformer-impl local --use-cpu-initialization --no-masked-softmax-fusion
--no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion --no-gradient-accumulation-fusion
--no-persist-layer-norm"""
TRAINING = """--micro-batch-size 1 --seq-length 64 --max-position-embeddings 128 --lr 1e-3 --log-interval 1
--eval-iters 0 --seed 1234 --tokenizer-type NullTokenizer --vocab-size 127 --make-vocab-size-divisible-by 64
--num-workers 0 --clip-grad 1.0 --wlb-thresholds 16,19,22,26,32,38,45,53"""
"""Thresholds are those of a run without a sample: to learn them takes each rank of each run a second."""


GPU_MODEL = "--num-layers 4 --hidden-size 256 --ffn-hidden-size 512"
GPU_MODEL += MODEL[MODEL.index(" --num-attention-heads") :]
GPU_MACHINE = "--distributed-backend nccl --bf16 --no-gradient-accumulation-fusion --wlb-rehearsal never"
GPU_TRAINING = TRAINING.replace("--seq-length 64 --max-position-embeddings 128", "")
GPU_TRAINING += " --seq-length 1024 --max-position-embeddings 2048"

EXPERT = ".experts."
"""In the names of experts' parameters."""

LENGTHS = [64, 5, 17, 1, 40, 33, 2, 64, 9, 28, 13, 61, 3, 50, 7, 22, 31, 64, 11, 4, 1, 26, 38, 45, 19, 6]
"""Documents (tokens) of the small test corpus; the window is 64."""


def flags(*more: str, **parallel: int) -> list[str]:
    """Megatron's flags for the small test model.

    Args:
        more: further flags, of which spaces part the words. Latent attention goes without --group-query-attention.
        parallel: tensor, pipeline, context sizes.
    """
    sizes = [f"--{name}-parallel-size={size}" for name, size in parallel.items()]
    text = [re.sub("^--(tensor|pipeline)-", r"--\1-model-", flag) for flag in sizes]
    made = [*MODEL.split(), *MACHINE.split(), *TRAINING.split(), *text, *" ".join(more).split()]
    without = {"--group-query-attention"} if "--multi-latent-attention" in made else set()
    return [flag for flag in made if flag not in without]


def write_corpus(
    prefix: Path, lengths: list[int], *, seed: int = 0, vocabulary: int = 127
) -> list[np.ndarray]:
    """A .bin/.idx pair by Megatron's own builder with random tokens; returns the documents."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    generator = np.random.default_rng(seed)
    documents = [generator.integers(0, vocabulary, length).astype(np.int32) for length in lengths]
    return rewrite_corpus(prefix, documents, IndexedDatasetBuilder)


def rewrite_corpus(prefix: Path, documents: list[np.ndarray], builder_class: Any = None) -> list[np.ndarray]:
    """Write these documents as a .bin/.idx pair."""
    if builder_class is None:
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder as builder_class
    builder = builder_class(f"{prefix}.bin", dtype=np.int32)
    for document in documents:
        builder.add_document(document, [len(document)])
    builder.finalize(f"{prefix}.idx")
    return documents


def gpu_environment() -> dict[str, str]:
    """This process's environment with the package on PYTHONPATH; one queue a GPU, as Megatron asks for."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    own = {"PYTHONPATH": os.pathsep.join(path for path in paths if path), "PYTHONWARNINGS": "ignore"}
    return {**os.environ, **own, "OMP_NUM_THREADS": "4", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}


@contextlib.contextmanager
def small_disk(folder: Path, *, kilobytes: int) -> Iterator[bool]:
    """A file system of so much in `folder` while the block runs, which gets False where none can be mounted."""
    mount = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(folder)]
    mounted = subprocess.run(mount, check=False).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True)


def launch(
    arguments: list[str],
    processes: int,
    *,
    out: Path | None = None,
    timeout: float = 300,
    gpu: bool = False,
    stock: bool = False,
    fresh: bool = False,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Run the plugin's own entry, or the test worker, when `out` is given.

    On the CPU ranks are forked from a process that has imported Megatron (forked_ranks.py); fresh, and on GPUs: they
    are started by torch.distributed.run. stock: the worker without the plugin, see megatron_stock.py. After `timeout`
    seconds all of its processes are killed; TimeoutExpired.
    """
    worker = ROOT / "tests" / ("megatron_stock.py" if stock else "megatron_worker.py")
    target = ["-m", "wlb_megatron.pretrain_gpt"] if out is None else [str(worker)]
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        environment["WORKER_OUT"] = str(out)
    own = gpu_environment() if gpu else cpu_environment()
    if any("fsdp" in argument for argument in arguments):  # Megatron then refuses a single queue
        own["CUDA_DEVICE_MAX_CONNECTIONS"] = "8"
    if "--fine-grained-activation-offloading" in arguments:  # Megatron asks for it
        own["NVTE_CPU_OFFLOAD_V1"] = "1"
    if not (fresh or gpu):
        return forked_ranks.run(target, arguments, processes, {**own, **environment}, timeout=timeout)
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)),
        *("--master-addr", "127.0.0.1", "--master-port", str(free_port())),
        *target,
        *arguments,
    ]
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    with subprocess.Popen(command, env={**own, **environment}, **how) as job:
        try:
            output, errors = job.communicate(timeout=timeout)
        except BaseException:
            job.terminate()  # torch.distributed.run then ends its workers, which are not of its process group
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.communicate(timeout=40)
            with contextlib.suppress(ProcessLookupError):  # it has ended in time
                os.killpg(job.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(command, job.returncode, output, errors)


def output_of(arguments: list[str], processes: int, **how: Any) -> str:
    """What a run prints that must end well; how: as launch()."""
    done = launch(arguments, processes, **how)
    assert done.returncode == 0, failure(done)
    return done.stdout


def refusal_of(arguments: list[str], processes: int, **how: Any) -> str:
    """What a run writes on stderr that must end with status 1 and without a stack; how: as launch()."""
    done = launch(arguments, processes, **how)
    assert done.returncode == 1, failure(done)
    assert "Traceback" not in done.stderr, done.stderr
    return done.stderr


def run_script(
    text: str, arguments: list[str], folder: Path, processes: int = 1, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a script of a user's own, written into the folder, on ranks."""
    (folder / "script.py").write_text(text)
    script = [str(folder / "script.py")]
    return forked_ranks.run(script, arguments, processes, {**cpu_environment(), **environment}, timeout=200)


def train(arguments: list[str], processes: int, out: Path, **how: Any) -> list[dict[str, Any]]:
    """Run the worker; what each rank saw, in rank order. how: as launch()."""
    output_of(arguments, processes, out=out, **how)
    return read_ranks(out, processes)


def read_ranks(out: Path, processes: int) -> list[dict[str, Any]]:
    """What each rank of a run of the worker saw, in rank order."""
    return [torch.load(out / f"rank{rank}.pt", weights_only=False) for rank in range(processes)]


def failure(done: subprocess.CompletedProcess[str]) -> str:
    """What a failed run's ranks said last, without the launcher's own stack."""
    own = [line for line in done.stderr.splitlines() if line.startswith("[rank")]
    return "\n".join(own[-40:]) or done.stdout[-2000:] + done.stderr[-3000:]


def logged_losses(output: str) -> list[float]:
    """The losses of Megatron's own log lines, in order."""
    return [float(value) for value in re.findall(r"lm loss: ([0-9.Ee+-]+)", output)]


def mean_losses(
    ranks: list[dict[str, Any]], iterations: int, numbers: Sequence[int] | None = None
) -> list[float]:
    """Loss per predicted token of each iteration, over all ranks of the last pipeline stage (first TP rank).

    numbers: micro-batches of each iteration; None: equally many.
    """
    last = max(rank["place"]["pp"] for rank in ranks)
    scoring = [rank["losses"] for rank in ranks if rank["place"]["pp"] == last and rank["place"]["tp"] == 0]
    losses = []
    for iteration in range(iterations):
        parts = [_iteration(entries, iteration, iterations, numbers) for entries in scoring]
        chosen = [entry for part in parts for entry in part]
        losses.append(sum(loss for loss, _ in chosen) / sum(count for _, count in chosen))
    return losses


def numbers(ranks: list[dict[str, Any]]) -> list[int]:
    """Micro-batches of the first rank in each iteration, each counted once for all model chunks of its stage. Those of
    a rehearsal, iteration -1, are left out."""
    of = [iteration for iteration, _ in {entry[:2] for entry in ranks[0]["documents"]} if iteration >= 0]
    return [of.count(iteration) for iteration in sorted(set(of))]


def _iteration(
    entries: list[tuple[float, int]], iteration: int, iterations: int, numbers: Sequence[int] | None
) -> list[tuple[float, int]]:
    if numbers is not None:
        assert len(entries) == sum(numbers)
        return entries[sum(numbers[:iteration]) : sum(numbers[: iteration + 1])]
    size = len(entries) // iterations
    return entries[iteration * size : (iteration + 1) * size]


def differences(
    single: list[dict[str, Any]],
    ranks: list[dict[str, Any]],
    iterations: int,
    numbers: Sequence[int] | None = None,
) -> tuple[float, float, str]:
    """Largest relative difference of an iteration's loss, of a gradient (norms), and that gradient's parameter.

    numbers: micro-batches of the ranks in each iteration, where they change.

    KeyError where a parameter of the single process is on no rank.
    """
    expected, actual = mean_losses(single, iterations), mean_losses(ranks, iterations, numbers)
    loss = float(np.max(np.abs(np.subtract(actual, expected)) / np.abs(expected)))  # NaN where one is
    expected_gradients, gradients = whole_gradients(single), whole_gradients(ranks)
    errors = {
        name: float(torch.linalg.norm(gradients[name] - gradient) / torch.linalg.norm(gradient))
        for name, gradient in expected_gradients.items()
    }
    worst = max(errors, key=lambda name: errors[name] if errors[name] == errors[name] else float("inf"))
    return loss, errors[worst], worst


def check_alike(
    single: list[dict[str, Any]],
    ranks: list[dict[str, Any]],
    iterations: int,
    numbers: Sequence[int] | None = None,
) -> None:
    """Losses within 1e-6 of the single process's, and each gradient, which is not 0, within 1e-5; as differences()."""
    assert whole_gradients(ranks).keys() == whole_gradients(single).keys()
    loss, gradient, parameter = differences(single, ranks, iterations, numbers)
    assert loss <= 1e-6, f"losses are {loss:.1e} off"
    assert gradient <= 1e-5, f"{parameter} is {gradient:.1e} off"


def errors_by_kind(expected: list[dict[str, Any]], ranks: list[dict[str, Any]]) -> dict[str, float]:
    """Relative distance of gradients (norms), those of one parameter in all layers and experts taken together."""
    expected_gradients, gradients = whole_gradients(expected), whole_gradients(ranks)
    squares: dict[str, tuple[float, float]] = {}
    for name, gradient in expected_gradients.items():
        kind = re.sub(r"\d+", "*", name)
        apart, size = squares.get(kind, (0.0, 0.0))
        apart += float(torch.linalg.norm(gradients[name] - gradient)) ** 2
        squares[kind] = apart, size + float(torch.linalg.norm(gradient)) ** 2
    return {kind: (apart / size) ** 0.5 for kind, (apart, size) in squares.items()}


def without_plugin(arguments: list[str]) -> list[str]:
    """Flags of the same run for megatron_stock.py: without --wlb-*, whose values follow them; losses per token."""
    kept = [
        flag
        for before, flag in zip(["", *arguments], arguments, strict=False)
        if not (flag.startswith("--wlb-") or before.startswith("--wlb-"))
    ]
    return [*kept, *["--calculate-per-token-loss", "--dataloader-type", "single", "--eval-interval", "1000"]]


def whole_gradients(ranks: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Every parameter's gradient, tensor-parallel parts joined, pipeline stages together."""
    parts: dict[str, dict[int, tuple[torch.Tensor, int | None]]] = {}
    for rank in ranks:
        place = rank["place"]
        for name, (gradient, dim) in rank["gradients"].items():
            expert = EXPERT in name  # experts are spread over data- and context-parallel ranks
            if expert or not (place["cp"] or place["dp"]):
                parts.setdefault(name, {})[place["etp" if expert else "tp"]] = (gradient, dim)
    fused = ranks[0]["place"]["fused"]
    return {
        name: _join([by_rank[r] for r in sorted(by_rank)], name, fused) for name, by_rank in parts.items()
    }


def _join(
    parts: list[tuple[torch.Tensor, int | None]], name: str, fused: dict[str, tuple[int, ...]]
) -> torch.Tensor:
    dim = parts[0][1]
    if dim is None:
        return parts[0][0]
    of_ranks = [split_fused(tensor, dim, name, fused) for tensor, _ in parts]
    return torch.cat([torch.cat(section, dim) for section in zip(*of_ranks, strict=True)], dim)


def split_fused(
    tensor: torch.Tensor, dim: int, name: str, fused: dict[str, tuple[int, ...]]
) -> tuple[torch.Tensor, ...]:
    """The matrices that Megatron keeps as one, each of which it spreads over tensor-parallel ranks.

    fused: by a part of a parameter's name, the proportions of its matrices. linear_fc1 of (1, 1) is gate and up.
    """
    shares = next((shares for part, shares in fused.items() if part in name), (1,))
    return tensor.split([tensor.shape[dim] * share // sum(shares) for share in shares], dim)
