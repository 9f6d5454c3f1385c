"""An analysis as JSON and as a table."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from wlb_megatron.analyze.comparison import Analysis
from wlb_megatron.analyze.measure import Measured, spread
from wlb_megatron.packing.blocks import blocks
from wlb_megatron.report.table import print_table


def as_json(analysis: Analysis) -> dict[str, Any]:
    lengths, layout = analysis.lengths, analysis.layout
    return {
        "documents": len(lengths),
        "tokens": int(lengths.sum()),
        "empty_documents": sum(int((block == 0).sum()) for block in blocks(lengths)),
        "overlong_documents": sum(int((block > layout.window).sum()) for block in blocks(lengths)),
        "layout": asdict(layout) | {"micro_batches": analysis.micro_batches},
        "quadratic_at": analysis.quadratic_at,
        "max_tokens": analysis.capacity,
        "thresholds": analysis.thresholds,
        "results": {
            key: {"packing": name, **figures(measured)}
            for key, (name, measured) in zip(("before", "after"), analysis.measured, strict=True)
        },
        "predicted_speedup": analysis.speedup,
        "equal_work_speedup": analysis.equal_work_speedup,
        "recommended": analysis.speedup >= 1,
        "flags": analysis.flags,
    }


def figures(measured: Measured) -> dict[str, Any]:
    """All that is told of one packing."""
    tokens = measured.tokens
    return {
        "iterations": len(measured.work),
        "tokens": tokens,
        "imbalance": asdict(measured.imbalance),
        "cp_imbalance": asdict(spread(measured.cp_imbalance)),
        "token_delay": asdict(measured.token_delay),
        "step_ms": asdict(spread(measured.steps)),
        "tokens_per_second": 1e9 / measured.simulated.ns_per_token,
        "step_over_ideal": measured.simulated.step_over_ideal,
        "waiting": measured.waiting,
        "micro_batches": asdict(spread([len(work) for work in measured.work])),
        "iteration_tokens": asdict(spread(measured.totals)),
        "micro_batch_tokens": asdict(spread(measured.lengths)),
        "documents_in_chunks": asdict(measured.documents_in_chunks),
        "micro_batch_documents": asdict(spread(measured.documents)),
        "padding_share": measured.padding / (tokens + measured.padding),
    }


def print_analysis(analysis: Analysis) -> None:
    told = as_json(analysis)
    (before, old), (after, new) = ((r["packing"], r) for r in told["results"].values())
    rows = []
    for key, name, form in (
        ("imbalance", "imbalance of micro-batches (max/mean work)", "{:.3f}"),
        ("cp_imbalance", "imbalance of CP ranks (max/mean work)", "{:.3f}"),
        ("step_ms", "step (ms, simulated)", "{:,.1f}"),
        ("micro_batches", "micro-batches of a rank", "{:,.1f}"),
        ("documents_in_chunks", "documents in chunks (of an iteration)", "{:,.1f}"),
        ("token_delay", "token delay (iterations)", "{:.2f}"),
        ("iteration_tokens", "tokens of an iteration (global batch)", "{:,.0f}"),
        ("micro_batch_tokens", "tokens of a micro-batch", "{:,.0f}"),
        ("micro_batch_documents", "documents of a micro-batch", "{:,.0f}"),
    ):
        cells = [form.format(result[key][which]) for result in (old, new) for which in ("mean", "p95", "max")]
        rows.append([name, *cells])
    told_once = [
        ("step over ideal (same work, no waiting)", lambda r: f"{r['step_over_ideal']:.3f}"),
        ("- filling and draining the pipeline", lambda r: f"{r['waiting']['fill']:+.3f}"),
        ("- slower context-parallel ranks", lambda r: f"{r['waiting']['cp_ranks']:+.3f}"),
        ("- slower data-parallel ranks", lambda r: f"{r['waiting']['dp_ranks']:+.3f}"),
        ("- unlike micro-batches, ends, hosts, transfers", lambda r: f"{r['waiting']['rest']:+.3f}"),
    ]
    rows += [[name, tell(old), "", "", tell(new), "", ""] for name, tell in told_once]
    rows.append(["padding", *(c for r in (old, new) for c in (f"{100 * r['padding_share']:.3f}%", "", ""))])
    print(
        f"{told['documents']:,} documents, {told['tokens']:,} tokens; {told['empty_documents']:,} empty (left out), "
        f"{told['overlong_documents']:,} above the window ({analysis.config.overlong})"
    )
    print_table(
        f"{old['iterations']} iterations: {before}   |   {after}",
        ["", "mean", "p95", "max", "mean", "p95", "max"],
        rows,
    )
    waits = f"from {min(analysis.thresholds):,} tokens" if analysis.thresholds else "no documents"
    print(
        f"Lmax {analysis.capacity:,} tokens, documents wait {waits}; work = d + d*d/{told['quadratic_at']:,.0f}"
    )
    print(
        f"predicted speed-up over arrival order with the same mask: {analysis.speedup:.3f} by token, "
        f"{analysis.equal_work_speedup:.3f} at equal work"
    )
    if analysis.speedup < 1:
        print("not worth it: arrival order is predicted to be faster, its flags follow")
    print(f"flags: {analysis.flags}")
    if analysis.assumed:
        print("no model was told, a 7B is assumed; give --model, --hidden-size and the like, or --profile")
