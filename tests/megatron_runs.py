"""Run Megatron through the plugin in child processes and read what every rank saw."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts" / "cpu"))
from environment import cpu_environment, free_port  # noqa: E402

MODEL = """--num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --group-query-attention
--num-query-groups 2 --normalization RMSNorm --swiglu --position-embedding-type rope --disable-bias-linear
--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0"""
MACHINE = """--distributed-backend gloo --transformer-impl local --use-cpu-initialization --no-masked-softmax-fusion
--no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion --no-gradient-accumulation-fusion
--no-persist-layer-norm"""
TRAINING = """--micro-batch-size 1 --seq-length 64 --max-position-embeddings 128 --lr 1e-3 --log-interval 1
--eval-iters 0 --seed 1234 --tokenizer-type NullTokenizer --vocab-size 127 --make-vocab-size-divisible-by 64
--num-workers 0 --clip-grad 1.0"""


LENGTHS = [64, 5, 17, 1, 40, 33, 2, 64, 9, 28, 13, 61, 3, 50, 7, 22, 31, 64, 11, 4, 1, 26, 38, 45, 19, 6]
"""Documents (tokens) of the small test corpus; the window is 64."""


def flags(**parallel: int) -> list[str]:
    """Megatron's flags for the small test model; parallel: tensor, pipeline, context sizes."""
    sizes = [f"--{name}-parallel-size={size}" for name, size in parallel.items()]
    text = [
        flag.replace("--tensor-", "--tensor-model-").replace("--pipeline-", "--pipeline-model-")
        for flag in sizes
    ]
    return [*MODEL.split(), *MACHINE.split(), *TRAINING.split(), *text]


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


def launch(
    arguments: list[str], processes: int, *, out: Path | None = None, timeout: int = 300, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the plugin's own entry (or the test worker, when `out` is given) over torch.distributed.run."""
    target = (
        ["-m", "wlb_megatron.pretrain_gpt"] if out is None else [str(ROOT / "tests" / "megatron_worker.py")]
    )
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        environment["WORKER_OUT"] = str(out)
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)),
        *("--master-addr", "127.0.0.1", "--master-port", str(free_port())),
        *target,
        *arguments,
    ]
    return subprocess.run(
        command,
        env={**cpu_environment(), **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def train(arguments: list[str], processes: int, out: Path, **environment: str) -> list[dict[str, Any]]:
    """Run the worker; what each rank saw, in rank order."""
    done = launch(arguments, processes, out=out, **environment)
    assert done.returncode == 0, failure(done)
    return [torch.load(out / f"rank{rank}.pt", weights_only=False) for rank in range(processes)]


def failure(done: subprocess.CompletedProcess[str]) -> str:
    """What a failed run's ranks said last, without the launcher's own stack."""
    own = [line for line in done.stderr.splitlines() if line.startswith("[rank")]
    return "\n".join(own[-40:]) or done.stdout[-2000:] + done.stderr[-3000:]


def logged_losses(output: str) -> list[float]:
    """The losses of Megatron's own log lines, in order."""
    return [float(value) for value in re.findall(r"lm loss: ([0-9.Ee+-]+)", output)]


def whole_gradients(ranks: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Every parameter's gradient, tensor-parallel parts joined, pipeline stages together."""
    parts: dict[str, dict[int, tuple[torch.Tensor, int | None]]] = {}
    for rank in ranks:
        if rank["place"]["cp"] or rank["place"]["dp"]:
            continue
        for name, (gradient, dim) in rank["gradients"].items():
            parts.setdefault(name, {})[rank["place"]["tp"]] = (gradient, dim)
    return {name: _join(name, [by_rank[r] for r in sorted(by_rank)]) for name, by_rank in parts.items()}


def _join(name: str, parts: list[tuple[torch.Tensor, int | None]]) -> torch.Tensor:
    dim = parts[0][1]
    tensors = [tensor for tensor, _ in parts]
    if dim is None:
        return tensors[0]
    if "linear_fc1" in name:
        return torch.cat([torch.cat([t.chunk(2, dim)[half] for t in tensors], dim) for half in (0, 1)], dim)
    return torch.cat(tensors, dim)
