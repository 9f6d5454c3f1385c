"""What each trained iteration's plan did, in Megatron's log, its TensorBoard / W&B writers, and a JSON-lines file.

Figures are made when a step's forwards and backwards are launched, and reported after Megatron has logged the
iteration: the time from the step's start to then is what the iteration took, since Megatron waits for the gradients'
norm in between.
"""

from __future__ import annotations

import json
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any

import torch

from wlb_megatron.config import WlbConfig
from wlb_megatron.documents.stream import describe_passes, figures_of_passes
from wlb_megatron.pipeline.orders import documents_in_chunks
from wlb_megatron.plan import IterationPlan
from wlb_megatron.plugin.flags.refusal_printing import never_fatal
from wlb_megatron.plugin.job_state import part
from wlb_megatron.plugin.micro_batches.loaded import LoadedMicroBatch
from wlb_megatron.plugin.micro_batches.planning import PlannedIteration, PlannedMicroBatch
from wlb_megatron.report.terminal import duration
from wlb_megatron.sharding.segments import ShardPlan

WINDOW = 200
"""Iterations whose time, evaluations and saves between them included, is expected of the next ones."""


class Progress:
    """Of this start of the run."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock, self._began = clock, round(clock(), 3)
        self._ended: deque[tuple[int, float]] = deque(maxlen=WINDOW)

    def add(self, iteration: int, of: int | None) -> dict[str, Any]:
        """Figures after an iteration. of: iterations of the whole run; None: not known.

        seconds_left is missing until two iterations have ended.
        """
        now = self._clock()
        self._ended.append((iteration, now))
        figures: dict[str, Any] = {"time": round(now, 3), "started": self._began, "train_iterations": of}
        (first, then), passed = self._ended[0], iteration - self._ended[0][0]
        if of and passed > 0 and now > then:
            figures["seconds_left"] = round((of - iteration) * (now - then) / (iteration - first), 1)
        return figures


def describe(figures: Mapping[str, Any]) -> str:
    """The part of a log line behind the iteration's number."""
    of, seconds_left = figures.get("train_iterations"), figures.get("seconds_left")
    if not of:
        return ""
    line = f" of {of} ({figures['iteration'] / of:.1%}"
    return line + (f", {duration(seconds_left)} left)" if seconds_left is not None else ")")


_LONG = ("iteration", "lengths", "epochs")
"""Figures that are no number of an iteration, or many: not for TensorBoard and Weights & Biases."""
_NO_FIGURES = "figures of an iteration are not reported"


@dataclass(slots=True)
class Figures:
    """pending: figures of the iteration that is not yet logged, and when it began (perf_counter). thrown_away:
    iterations, documents and tokens since the last line whose update Megatron threw away (in fp16, if a gradient
    overflows). memory_peak: bytes over all steps; steps that plan what they recompute reset torch's. predicted_ms: sums
    since the start in arrival order, and as planned.
    """

    pending: tuple[dict[str, Any], float] | None = None
    progress: Progress = field(default_factory=Progress)
    thrown_away: Counter[str] = field(default_factory=Counter)
    memory_peak: int = 0
    of_memory: Callable[[], dict[str, Any]] = dict
    predicted_ms: tuple[float, float] = 0.0, 0.0


def stepped(
    iteration: int,
    batches: Sequence[LoadedMicroBatch],
    planned_iteration: PlannedIteration,
    config: WlbConfig,
    *,
    step_start: float,
    waited: float,
    corpora: Sequence[str],
) -> None:
    """Note the iteration whose micro-batches were just launched. Only the last rank does, as Megatron logs there.

    iteration: its number in Megatron's log. config: completed. step_start: when (perf_counter); waited: for its plan
    (seconds). corpora: names of those that train, in the stream's order.
    """
    from megatron.training.utils import is_last_rank

    if not is_last_rank():
        return
    with never_fatal(_NO_FIGURES):
        assert config.quadratic_at is not None
        figures = step_figures(batches, config.quadratic_at)
        figures |= {
            "plan_wait_ms": waited * 1e3,
            "put_back": planned_iteration.put_back,
            "above_spread": planned_iteration.above_spread,
            "consumed_tokens": planned_iteration.trained,
            "predicted_ms": planned_iteration.predicted_ms,
            "arrival_ms": planned_iteration.arrival_ms,
            **figures_of_passes(planned_iteration.stream, corpora),
        }
        if config.log_plans and planned_iteration.plan is not None:
            figures["lengths"] = plan_lengths(planned_iteration.plan)
        part(Figures).pending = ({**figures, "iteration": iteration}, step_start)


def report_iteration(skipped: int) -> None:
    """After training_log: the plugin's own figures of the iteration. skipped: whether its update was thrown away."""
    from megatron.training import get_args

    from wlb_megatron.plugin.logs import flops

    state = part(Figures)
    if state.pending is None:
        return
    (figures, step_start), state.pending = state.pending, None
    with never_fatal(_NO_FIGURES):
        seconds = time.perf_counter() - step_start
        gpus = torch.distributed.get_world_size()
        figures |= state.progress.add(figures["iteration"], get_args().train_iters)
        figures |= state.of_memory()
        if get_args().distributed_backend == "nccl":
            state.memory_peak = max(state.memory_peak, torch.cuda.max_memory_allocated())
            figures["memory_peak_gb"] = round(state.memory_peak / 1e9, 2)
            figures["tokens_per_second_per_gpu"] = figures["tokens"] / seconds / gpus
            if (operations := flops.logged_operations()) is not None:
                figures["tflops_per_gpu"] = operations / 1e12 / seconds / gpus
        figures["measured_ms"] = seconds * 1e3
        _report(figures | {"update_skipped": int(skipped)})


def _report(figures: dict[str, Any]) -> None:
    from megatron.training import get_args, get_tensorboard_writer, get_wandb_writer

    args, iteration, state = get_args(), figures["iteration"], part(Figures)
    predicted_ms, arrival = figures["predicted_ms"], figures["arrival_ms"]
    if predicted_ms is not None and arrival is not None:
        state.predicted_ms = state.predicted_ms[0] + arrival, state.predicted_ms[1] + predicted_ms
    if figures.get("update_skipped"):
        state.thrown_away.update(iterations=1, documents=figures["documents"], tokens=figures["tokens"])
    with never_fatal("the log line is not printed"):
        if iteration % args.log_interval == 0:
            gain = state.predicted_ms[0] / state.predicted_ms[1] if state.predicted_ms[1] else None
            print(log_line(figures, state.thrown_away, gain=gain), flush=True)
            state.thrown_away.clear()
    writer, wandb = get_tensorboard_writer(), get_wandb_writer()
    scalars = {f"wlb/{name}": value for name, value in figures.items() if name not in _LONG}
    if writer and iteration % args.tensorboard_log_interval == 0:
        with never_fatal("TensorBoard gets no figures of plans"):
            _add_scalars(writer, scalars, iteration)
    if wandb:
        with never_fatal("Weights & Biases gets no figures of plans"):
            wandb.log(scalars, iteration)
    if args.wlb_log:
        with never_fatal(f"--wlb-log {args.wlb_log} cannot be written"):
            # The epochs of a blend of thousands are long: they stand in the lines that are logged, too.
            line_figures = figures if iteration % args.log_interval == 0 else {**figures, "epochs": None}
            append_line(args.wlb_log, json.dumps(line_figures))


def _add_scalars(writer: Any, scalars: dict[str, Any], iteration: int) -> None:
    for name, value in scalars.items():
        if isinstance(value, int | float):
            writer.add_scalar(name, value, iteration)
    for kind, count in scalars["wlb/shardings"].items():
        writer.add_scalar(f"wlb/sharding-{kind}", count, iteration)


def append_line(path: str, line: str) -> None:
    """Append a whole line or nothing. OSError if it cannot be written, as on a full disk."""
    with open(path, "ab", buffering=0) as lines:
        size = lines.tell() if lines.seekable() else None
        unwritten = memoryview(f"{line}\n".encode())
        try:
            while unwritten:
                unwritten = unwritten[lines.write(unwritten) :]
        except OSError:
            if size is not None:
                lines.truncate(size)
            raise


def log_line(
    figures: dict[str, Any],
    thrown_away: Mapping[str, int] = MappingProxyType({}),
    *,
    gain: float | None = None,
) -> str:
    """One line of an iteration. thrown_away: iterations, documents and tokens whose update was not applied, since the
    last line. gain: arrival order's predicted time over this one's, so far. A CPU's figures have no rates and no
    memory."""
    rate = "".join(
        f", {figures[name]:.0f}{unit}"
        for name, unit in (("tokens_per_second_per_gpu", "/s/GPU"), ("tflops_per_gpu", " TFLOP/s/GPU"))
        if name in figures
    )
    targets = f" ({figures['targets']} targets)" if "targets" in figures else ""
    spread = f", {count} steps above --wlb-batch-spread" if (count := figures.get("above_spread")) else ""
    in_chunks = ""
    if count := figures.get("documents_in_chunks"):
        in_chunks = f", {count} documents in {figures['chunks']} chunks"
    line = (
        f" [wlb] iteration {figures['iteration']}{describe(figures)} | imbalance (max/mean work): micro-batches "
        f"{figures['imbalance']:.3f}, CP ranks {figures['cp_imbalance']:.3f} | step over ideal: "
        f"{figures['step_over_ideal']:.3f} with {figures['micro_batches']} micro-batches{in_chunks} | "
        f"tokens: {figures['tokens']}{targets}, "
        f"{figures['consumed_tokens']} so far{rate}{spread} | "
        f"delayed documents: {figures['delayed']} | mean token delay: {figures['token_delay']:.3f} | "
        f"plan ms: {figures['plan_ms']:.2f} (waited {figures['plan_wait_ms']:.2f})"
    )
    line += describe_passes(figures)
    if thrown_away:
        line += (
            f" | updates thrown away: {thrown_away['iterations']}, with {thrown_away['documents']} documents, "
            f"{thrown_away['tokens']} tokens"
        )
    if figures.get("shardings"):
        line += " | sharding: " + ", ".join(f"{n} {kind}" for kind, n in figures["shardings"].items())
    if "recomputed_share" in figures:
        line += f" | layers recomputed: {figures['recomputed_share']:.1%}"
    if figures.get("peak_gib"):
        line += (
            f", peak GiB: {figures['peak_gib']:.2f} of {figures['available_gib']:.2f}, planned "
            f"{figures['planned_peak_gib']:.2f}"
        )
    if figures["predicted_ms"] is None:
        return line
    line += f" | ms: {figures['measured_ms']:.1f}, predicted {figures['predicted_ms']:.1f}"
    return line if gain is None else line + f" | predicted gain over arrival order: {gain:.3f} so far"


def plan_lengths(plan: IterationPlan) -> list[list[list[int]]]:
    """Tokens of each piece, [micro-batch][data-parallel rank][piece], without padding."""
    return [
        [[piece.tokens for piece in micro_batch.pieces] for micro_batch in row] for row in plan.micro_batches
    ]


def step_figures(batches: Sequence[LoadedMicroBatch], quadratic_at: float) -> dict[str, Any]:
    """The plan's summary with what only the shard plans know (of this data-parallel rank's micro-batches)."""
    micro_batches = [batch.planned for batch in batches]
    shares = [work_per_rank(item.shard, quadratic_at) for item in micro_batches]
    mean = sum(sum(share) / len(share) for share in shares)
    real = [sum(piece.tokens for piece in item.pieces if piece.document >= 0) for item in micro_batches]
    total = sum(item.shard.tokens for item in micro_batches)
    return {
        **asdict(micro_batches[0].summary),
        "cp_imbalance": sum(max(share) for share in shares) / mean,
        "padding": total - sum(real),
        "plan_ms": micro_batches[0].plan_seconds * 1e3,
        "micro_batch_tokens": [item.shard.tokens for item in micro_batches],
        "micro_batch_work": [sum(share) for share in shares],
        **({"targets": micro_batches[0].predictions[0]} if micro_batches[0].predictions else {}),
        "shardings": dict(Counter(item.shard.kind for item in micro_batches if item.shard.kind)),
        **_groups(micro_batches),
        **_chunks(micro_batches),
    }


def _chunks(micro_batches: Sequence[PlannedMicroBatch]) -> dict[str, Any]:
    """With documents in chunks: sizes of this rank's groups, and the document that each micro-batch has a chunk of."""
    sizes = micro_batches[0].chunk_groups
    if not sizes:
        return {}
    return {
        "chunk_groups": list(sizes),
        "chunks_of": documents_in_chunks([micro_batch.pieces for micro_batch in micro_batches]),
    }


def _groups(micro_batches: Sequence[PlannedMicroBatch]) -> dict[str, Any]:
    """With dynamic groups: this rank's, whose plan it is, and its predicted speed-up over fixed groups."""
    groups = [item.group for item in micro_batches if item.group is not None]
    if not groups:
        return {}
    first = groups[0]
    return {"group_sizes": [g.size for g in groups], "plan_of": first.source, "predicted_gain": first.gain}


def work_per_rank(plan: ShardPlan, quadratic_at: float) -> list[float]:
    """Work of each context-parallel rank, in tokens of linear work: its tokens, plus the keys its queries see.

    A whole document of d tokens counts d + d*d/quadratic_at, as in the cost model: queries [s, e) see
    (e*e - s*s)/2 keys.
    """
    shares = []
    for rows in plan.ranks:
        start, end = rows[:, 1].astype(float), rows[:, 2].astype(float)
        shares.append(float((end - start).sum() + ((end * end - start * start) / quadratic_at).sum()))
    return shares
