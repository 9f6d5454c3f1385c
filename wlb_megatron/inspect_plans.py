"""What `wlb-megatron inspect` shows: the plans of documents of given lengths, in the given order, as plain integers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import islice
from typing import Any

from wlb_megatron.config import WlbConfig
from wlb_megatron.documents.corpus import Lengths, Rules
from wlb_megatron.documents.lengths import longest_whole, sample_lengths
from wlb_megatron.documents.stream import DocumentStream
from wlb_megatron.errors import WlbError, explain_bad_values
from wlb_megatron.packing.chunk_packer import ChunkPacker
from wlb_megatron.packing.factory import nothing_predicted, plan_job
from wlb_megatron.packing.limits import holds_whole
from wlb_megatron.packing.packer import PackingJob
from wlb_megatron.packing.varlen.varlen_packer import lmax
from wlb_megatron.plan import IterationPlan, Piece
from wlb_megatron.sharding.cut import cut_plans, pad
from wlb_megatron.sharding.slots import multiple
from wlb_megatron.simulator.job import Job
from wlb_megatron.workload.cost_model import MICRO_BATCH_TOKENS, CostModel
from wlb_megatron.workload.kernel_table import h100
from wlb_megatron.workload.model import Layout

QUADRATIC_AT = 24576.0
"""Used if neither quadratic_at nor a model's shape is given (tokens): close to a 7B model's."""


def inspect_plans(
    lengths: Lengths,
    config: WlbConfig,
    layout: Layout,
    *,
    window: int,
    iterations: int | None = None,
    job: Job | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Plans of one pass over the documents, without a shuffle; at most `iterations` of them.

    lengths: integers[n], tokens of each document; ids are positions in it. layout: its micro_batches are the windows
    of a data-parallel rank. The plan may make more micro-batches of them, shown in the order of their forwards.
    job: the same job with its model and a GPU's memory, by which work and Lmax are counted and layers kept. say:
    called with the lines that a run prints at start.

    Returns {"iterations": [{"arrived", "micro_batches", "waiting"}, ...]}. Every piece and segment is [id, start,
    end) within its document; padding is [-1, 0, tokens]. If documents come in chunks, a micro-batch's "prefix" gives,
    for each of its "documents", the number of its earlier tokens that it attends to, 0 for a whole one. Where steps
    plan what they recompute, its "recomputed" gives the layers of each stage's model chunks that it recomputes, and
    "stages" what each pipeline stage holds (StageMemory), with "available" bytes for it. WlbError on settings that
    cannot work.
    """
    if config.cp_mode != "fixed":
        raise WlbError(
            "--wlb-cp-mode dynamic is planned by a model's predicted times, which inspect does not know: use "
            "wlb-megatron analyze, or leave it out"
        )
    if config.regather_keys:
        raise WlbError("--wlb-regather-keys changes no plan, which is all that inspect shows: leave it out")
    with explain_bad_values():
        cp, alignment = layout.context, multiple(layout.context, layout.tensor)
        max_tokens, _ = longest_whole(config.overlong, window, layout.micro_batches)
        rules = Rules(max_tokens, config.overlong)
        stream = DocumentStream.of_lengths(lengths, rules, name="--lengths")
        if problem := nothing_predicted(lengths, rules):
            say(f"WARNING: {problem}")
        config = config if job is None else job.with_lmax(config)
        if not config.fixed_windows and (config.chunks == "off" or holds_whole(config, window, alignment)):
            # Any window can be looked at, a multiple of CP x TP or not: a padded micro-batch keeps within Lmax.
            config = replace(config, max_tokens=lmax(config, window, alignment))
        elif config.max_tokens is not None:
            config = replace(config, max_tokens=max(alignment, config.max_tokens // alignment * alignment))
        packing = PackingJob(
            config=config,
            cost=_cost(config, cp) if job is None else job.cost(config),
            window=window,
            micro_batches=layout.micro_batches,
            dp=layout.data,
            pp=layout.pipeline,
            vpp=layout.virtual,
            sample=sample_lengths(lengths, max_tokens, config.overlong),
            longest=stream.longest,
            rooms=None if job is None else job.rooms(config),
            no_chunks=() if job is None else job.trainer.chunks_refused(config.chunks),
            times=None if job is None else job.times(config),
            say=say,
        )
        planner = plan_job(stream, packing)
    plans = list(islice(iter(planner.next_iteration, None), iterations))
    chunked = isinstance(planner.packer, ChunkPacker)
    inspection: dict[str, Any] = {
        "iterations": [_show(plan, config.sharding, cp, alignment, chunked) for plan in plans]
    }
    recomputation = None if job is None else job.times(config).kept_layers(plans)
    if job is not None and recomputation is not None:
        for iteration, step in zip(inspection["iterations"], recomputation, strict=True):
            for number, micro_batch in enumerate(iteration["micro_batches"]):
                stages = step[micro_batch["dp"]]
                micro_batch["recomputed"] = [
                    list(stage.recomputed[number // layout.data]) for stage in stages
                ]
        inspection["stages"] = [
            {"available": job.gpu.available(stage), **asdict(job.gpu.stage(stage))}
            for stage in range(layout.pipeline)
        ]
    return inspection


def _cost(config: WlbConfig, cp: int) -> CostModel:
    return CostModel(
        QUADRATIC_AT if config.quadratic_at is None else config.quadratic_at,
        config.document_cost or 0.0,
        MICRO_BATCH_TOKENS * cp if config.micro_batch_cost is None else config.micro_batch_cost,
    )


def _show(plan: IterationPlan, sharding: str, cp: int, alignment: int, chunked: bool) -> dict[str, Any]:
    grid = [(rank, micro_batch) for row in plan.micro_batches for rank, micro_batch in enumerate(row)]
    padded = [pad(micro_batch.pieces, alignment) for _, micro_batch in grid]
    (rows,) = cut_plans([plan], cp, alignment, sharding, h100())
    shards = [shard for row in rows for shard in row]
    return {
        "arrived": [_row(piece) for piece in plan.arrived],
        "micro_batches": [
            {
                "dp": rank,
                "documents": [_row(piece) for piece in pieces],
                "ranks": [_segments(pieces, rows.tolist()) for rows in shard.ranks],
                **({"prefix": [piece.prefix for piece in pieces]} if chunked else {}),
            }
            for (rank, _), pieces, shard in zip(grid, padded, shards, strict=True)
        ],
        "waiting": [_row(piece) for piece in plan.waiting],
    }


def _row(piece: Piece) -> list[int]:
    return [piece.document, piece.start, piece.end]


def _segments(pieces: tuple[Piece, ...], rows: list[list[int]]) -> list[list[int]]:
    """A rank's segments within their documents: (0, 2, 4) of a piece of document 7 that begins at 16 is [7, 18, 20]."""
    first = [piece.start - piece.prefix for piece in pieces]
    return [[pieces[k].document, first[k] + start, first[k] + end] for k, start, end in rows]
