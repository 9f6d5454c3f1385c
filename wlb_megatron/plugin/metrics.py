"""What each trained iteration's plan did, in Megatron's log, its TensorBoard / W&B writers, and a JSON-lines file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from wlb_megatron.plugin.planning import PlannedMicroBatch
from wlb_megatron.sharding.segments import ShardPlan


def report(batches: Sequence[dict[str, Any]], *, plan_wait_ms: float, put_back: int) -> None:
    """Report the iteration whose micro-batches just trained. Only the last rank writes, as Megatron does."""
    from megatron.training import get_args, get_tensorboard_writer, get_wandb_writer
    from megatron.training.utils import is_last_rank

    if not is_last_rank():
        return
    args = get_args()
    figures = step_figures(batches, args.wlb_quadratic_at)
    figures |= {"plan_wait_ms": plan_wait_ms, "put_back": put_back}
    iteration = args.curr_iteration + 1
    if iteration % args.log_interval == 0:
        print(
            f" [wlb] iteration {iteration} | imbalance (max/mean work): micro-batches {figures['imbalance']:.3f}, "
            f"CP ranks {figures['cp_imbalance']:.3f} | tokens: {figures['tokens']} | "
            f"delayed documents: {figures['delayed']} | mean token delay: {figures['token_delay']:.3f} | "
            f"plan ms: {figures['plan_ms']:.2f} (waited {figures['plan_wait_ms']:.2f})",
            flush=True,
        )
    writer, wandb = get_tensorboard_writer(), get_wandb_writer()
    shown = {f"wlb/{name}": value for name, value in figures.items() if name != "iteration"}
    if writer and iteration % args.tensorboard_log_interval == 0:
        for name, value in shown.items():
            if isinstance(value, int | float):
                writer.add_scalar(name, value, iteration)
    if wandb:
        wandb.log(shown, iteration)
    if args.wlb_log:
        with open(args.wlb_log, "a", encoding="utf-8") as lines:
            lines.write(json.dumps({**figures, "iteration": iteration}) + "\n")


def step_figures(batches: Sequence[dict[str, Any]], quadratic_at: float) -> dict[str, Any]:
    """The plan's summary with what only the shard plans know (of this data-parallel rank's micro-batches)."""
    planned = [batch["planned"] for batch in batches]
    shares = [work_per_rank(item.shard, quadratic_at) for item in planned]
    mean = sum(sum(share) / len(share) for share in shares)
    real = [sum(piece.tokens for piece in item.pieces if piece.document >= 0) for item in planned]
    total = sum(item.shard.tokens for item in planned)
    return {
        **asdict(planned[0].summary),
        "cp_imbalance": sum(max(share) for share in shares) / mean,
        "padding": total - sum(real),
        "plan_ms": planned[0].plan_seconds * 1e3,
        "micro_batch_tokens": [item.shard.tokens for item in planned],
        "micro_batch_work": [sum(share) for share in shares],
        **_groups(planned),
    }


def _groups(planned: Sequence[PlannedMicroBatch]) -> dict[str, Any]:
    """With dynamic groups: this rank's, whose plan it is, and its predicted speed-up over fixed groups."""
    groups = [item.group for item in planned if item.group is not None]
    if not groups:
        return {}
    told = groups[0]
    return {"group_sizes": [g.size for g in groups], "plan_of": told.source, "predicted_gain": told.gain}


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
