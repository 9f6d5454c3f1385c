"""An analysis as JSON and on one screen."""

from __future__ import annotations

from dataclasses import asdict
from textwrap import wrap
from typing import Any

from wlb_megatron.analyze.comparison import NOISE, STEADY, Analysis, Gain
from wlb_megatron.analyze.measure import Measured, spread, waiting
from wlb_megatron.analyze.search import Found, Searched
from wlb_megatron.arguments import flags_of, renamed
from wlb_megatron.documents.corpus import blocks
from wlb_megatron.report.terminal import print_table
from wlb_megatron.workload.memory import GIB


def as_json(analysis: Analysis) -> dict[str, Any]:
    lengths, layout, job = analysis.lengths, analysis.job.model.layout, analysis.job
    before, after = (name for name, _ in analysis.measured)
    runs = analysis.weights_problem is None
    choice, steadier = (analysis.best, analysis.steadier) if runs else (None, None)
    return {
        "documents": len(lengths),
        "tokens": int(lengths.sum()),
        "empty_documents": sum(int((block == 0).sum()) for block in blocks(lengths)),
        "overlong_documents": sum(int((block > job.window).sum()) for block in blocks(lengths)),
        "layout": {
            **{"window": job.window, "dp": layout.data, "cp": layout.context, "tp": layout.tensor},
            **{"pp": layout.pipeline, "vpp": layout.virtual, "micro_batches": job.micro_batches},
        },
        "quadratic_at": analysis.job.cost(analysis.config).quadratic_at,
        "max_tokens": analysis.capacity,
        "thresholds": analysis.thresholds,
        "epoch": _epoch(analysis),
        "memory_gib": analysis.fullest and analysis.fullest[0] / GIB,
        "said": list(analysis.messages),
        "results": {
            "before": {"packing": before, **figures(analysis.before, equal_weights=False)},
            "after": {"packing": after, **figures(analysis.after, equal_weights=analysis.equal_weights)},
        },
        "predicted_speedup": analysis.speedup,
        "equal_work_speedup": analysis.equal_work_speedup,
        "speedup_over_unmasked": analysis.over_unmasked,
        "bound": analysis.bound,
        "gpus": job.model.layout.gpus,
        "model": asdict(job.model.shape),
        "kernel_table": job.model.measured.device,
        "profile": None if job.profile is None else job.profile.describe(),
        "assumptions": asdict(job.model.assumptions),
        "gains": [_gain(gain) for gain in analysis.gains],
        "above_spread": analysis.after.run.planner.above_spread,
        "fits": analysis.memory._asdict(),
        "weights_problem": analysis.weights_problem and renamed(analysis.weights_problem),
        "recommended": choice and _gain(choice),
        "flags": analysis.recommended.flags if runs else None,
        "steadier": steadier and steadier._asdict(),
        "search": None if analysis.searched is None else _search(analysis.searched),
    }


def _search(searched: Searched) -> dict[str, Any]:
    return {
        "tried": searched.tried,
        "given": searched.given and _found(searched.given),
        "best": [_found(setting) for setting in searched.best],
    }


def _found(setting: Found) -> dict[str, Any]:
    return {
        "flags": setting.flags,
        "tokens_per_second": setting.tokens_per_second,
        "slowest_ms": setting.slowest,
        "memory_gib": setting.memory / GIB,
        "why": setting.why,
    }


def _epoch(analysis: Analysis) -> dict[str, Any]:
    """Steps and tokens of an epoch, and how long the run takes in arrival order and as set (days)."""
    job, steps = analysis.job, analysis.job.run_steps
    tokens = int(analysis.lengths.sum())
    epoch = tokens / (job.micro_batches * job.model.layout.data * job.window)
    days = [steps and steps * float(m.steps.mean()) / 86_400_000 for m in (analysis.before, analysis.after)]
    return {"tokens": tokens, "steps": epoch, "run_steps": steps, "run_days": days}


def _gain(gain: Gain) -> dict[str, Any]:
    names = ("name", "alone", "by_token", "equal_work", "slowest", "fullest")
    return {name: getattr(gain, name) for name in names}


def figures(record: Measured, *, equal_weights: bool = False) -> dict[str, Any]:
    """All reported figures of one packing. equal_weights: a token weighs the same in every step."""
    tokens = record.tokens
    return {
        "iterations": len(record.work),
        "tokens": tokens,
        "imbalance": asdict(record.imbalance),
        "token_delay": asdict(record.token_delay),
        "long_documents_weight": 1.0 if equal_weights else record.long_weight,
        "step_ms": asdict(spread(record.steps)),
        "tokens_per_second": 1e9 / record.simulated.ns_per_token,
        "step_over_ideal": record.simulated.step_over_ideal,
        "waiting": waiting(record.simulated, record.layout),
        "micro_batches": asdict(spread([len(times) for times in record.simulated.micro_batches])),
        "iteration_tokens": asdict(spread(record.totals)),
        "batch_spread": dict(zip(("deviation", "max"), record.batch_spread, strict=True)),
        "micro_batch_tokens": asdict(spread(record.lengths)),
        "documents_in_chunks": asdict(record.documents_in_chunks),
        "padding_share": record.padding / (tokens + record.padding),
    }


WAITING = {
    "fill": "  filling and draining the pipeline",
    "micro_batches": "  unlike micro-batches, stages, hosts",
    "cp_ranks": "  slower context-parallel ranks",
    "dp_ranks": "  slower data-parallel ranks",
    "after": "  gradients, optimizer, between steps",
}


def print_analysis(analysis: Analysis) -> None:
    report = as_json(analysis)
    for line in (*_job_lines(analysis, report), *_verdict(analysis), ""):
        print(line)
    results = list(report["results"].values())
    rows = [
        [name, *(cell(result) for result in results)]
        for name, cell in (
            ("step, ms (mean / slowest)", lambda r: _pair(r["step_ms"], "{:,.0f}")),
            ("tokens a second", lambda r: f"{r['tokens_per_second']:,.0f}"),
            ("step over ideal (same work, no waiting)", lambda r: f"{r['step_over_ideal']:.3f}"),
            *((name, _share(key)) for key, name in WAITING.items()),
            ("imbalance of micro-batches' work, max/mean", lambda r: _pair(r["imbalance"], "{:.3f}")),
            ("micro-batches of a rank", lambda r: _pair(r["micro_batches"], "{:,.1f}")),
            ("documents in chunks", lambda r: _pair(r["documents_in_chunks"], "{:,.1f}")),
            ("tokens of a micro-batch", lambda r: _pair(r["micro_batch_tokens"], "{:,.0f}")),
            ("tokens of a step (global batch)", lambda r: _pair(r["iteration_tokens"], "{:,.0f}")),
            (
                "  over the mean (deviation / most)",
                lambda r: "{deviation:.2f} / {max:.2f}".format(**r["batch_spread"]),
            ),
            ("token delay, iterations", lambda r: _pair(r["token_delay"], "{:.2f}")),
            ("padding", lambda r: f"{100 * r['padding_share']:.1f} %"),
        )
    ]
    rows = [
        row for row in rows if any(set(cell) & set("123456789") for cell in row[1:])
    ]  # else it tells nothing
    # If steps decide, tokens of long documents weigh unlike others.
    if abs(analysis.after.long_weight - 1) >= 0.005:
        weights = [f"{result['long_documents_weight']:.2f}" for result in results]
        rows.append(["weight of a long document's tokens", *weights])
    print_table(
        f"{results[0]['iterations']} iterations, mean / most",
        ["", "arrival order", f"as set: {results[1]['packing']}"],
        rows,
    )
    if analysis.gains:
        print_table(
            "gain of each part (by token, over arrival order)",
            ["", "alone", "with those above", "at equal work", "slowest step", "fullest"],
            [_gain_row(gain) for gain in analysis.gains],
        )
    if report["above_spread"]:
        print(f"steps above --batch-spread, warm-up included: {report['above_spread']}")
    if analysis.searched is not None:
        _print_search(analysis.searched)
        print()
    for line in _ending(analysis):
        print(line)


def _print_search(searched: Searched) -> None:
    start, finds = searched.given, searched.best
    print()
    if not finds:
        problem = "fits the memory" if start is None else "is faster than the job as given"
        print(f"search: none of {searched.tried} settings {problem}")
        return
    entries = [setting for setting in (start, *finds) if setting is not None]
    rows = [
        [
            "as given" if setting is start else f"{number}",
            f"{setting.tokens_per_second:,.0f}",
            "" if start is None else f"{setting.tokens_per_second / start.tokens_per_second:.2f} x",
            f"{setting.memory / GIB:.1f}",
            f"{setting.slowest:,.0f}",
        ]
        for number, setting in enumerate(entries, 0 if start else 1)
    ]
    print_table(
        f"search: the best of {searched.tried} settings, first {searched.iterations} iterations of each",
        ["", "tokens a second", "over as given", "GiB at most", "slowest step, ms"],
        rows,
    )
    if searched.lmax is not None:
        what = f"with micro-batches up to {searched.lmax:,} tokens" if searched.lmax else "does not fit"
        print(f"as given {what}: unlike above, memory bounds all of these (--gpu-memory)")
    for number, setting in enumerate(finds, 1):
        print(f"{number}: {setting.flags}")
        if setting.why:
            print(f"   {setting.why}")


def _job_lines(analysis: Analysis, report: dict[str, Any]) -> list[str]:
    model = analysis.job.model
    layout, shape = model.layout, model.shape
    note = " (assumed: give --model)" if analysis.assumed else ""
    size = analysis.job.micro_batch_size
    windows = f", {size} in a micro-batch" if size > 1 else ""
    return [
        f"{report['documents']:,} documents, {report['tokens']:,} tokens; "
        f"{report['empty_documents']:,} empty (left out), "
        f"{report['overlong_documents']:,} above the window ({analysis.config.overlong})",
        f"{layout.gpus} GPU{'s' * (layout.gpus > 1)}: TP {layout.tensor}, CP {layout.context}, PP {layout.pipeline}, "
        f"DP {layout.data}; "
        f"{analysis.job.micro_batches} windows of {analysis.job.window:,} per data-parallel rank and step{windows}",
        f"model of {shape.layers} layers of {shape.hidden}, {model.parameters / 1e9:,.1f}B parameters{note}; "
        f"work = d + d*d/{report['quadratic_at']:,.0f}",
        f"times of {analysis.job.profile.describe()}; what it has not measured is assumed"
        if analysis.job.profile
        else f"kernel times of {analysis.job.model.measured.device}; other rates are assumed (--help)",
        f"network assumed: {analysis.job.model.assumptions.network_rate * 8e-9:,.0f} Gbit/s a GPU between nodes of "
        f"{analysis.job.model.assumptions.node} (--network-gbps)",
        _run_line(report["epoch"]),
        *map(renamed, analysis.messages),
        *_memory_lines(analysis),
    ]


def _run_line(epoch: dict[str, Any]) -> str:
    line = f"an epoch takes {epoch['steps']:,.1f} steps"
    if not epoch["run_steps"]:
        return line
    before, after = epoch["run_days"]
    return (
        f"{line}; {epoch['run_steps']:,} steps take {before:,.2f} days in arrival order, {after:,.2f} as set"
    )


def _memory_lines(analysis: Analysis) -> list[str]:
    """What the fullest GPU holds, or why that is not known."""
    if analysis.fullest is None:
        return ["memory is not estimated, because groups of --cp-mode dynamic are planned by time alone"]
    experts = analysis.job.model.shape.experts
    lines = []
    if experts is not None:
        source = "a layer of Qwen3-30B-A3B on an H200" if analysis.job.profile is None else "the profile"
        lines.append(
            f"times of experts are from {source}, their exchange between GPUs from the assumed rates"
        )
        lines.append(
            f"memory: the fullest rank's experts get {experts.imbalance / 100:g} times the mean of tokens "
            "(--expert-imbalance)"
        )
    total, weights = (size / GIB for size in analysis.fullest)
    note = "; steps keep what fits" if analysis.after.run.kept is not None else ""
    parts = f"{weights:.1f} of weights and optimizer, {total - weights:.1f} of activations"
    return [*lines, f"fullest GPU: {total:.1f} GiB at most ({parts}{note})"]


def _verdict(analysis: Analysis) -> list[str]:
    ratio = analysis.over_unmasked
    lines = (
        []
        if analysis.weights_problem is None
        else wrap(renamed(analysis.weights_problem), 100, break_on_hyphens=False)
    )
    lines += [
        f"predicted speed-up over arrival order with the same mask: {analysis.speedup:.3f} by token, "
        f"{analysis.equal_work_speedup:.3f} at equal work",
        f"of a perfectly balanced plan of the same documents: {analysis.bound:.3f} by token",
        f"over Megatron without a document mask, which attends over whole windows: {ratio:.3f} by token",
    ]
    gain = analysis.best
    if gain.config is analysis.config or analysis.weights_problem is not None:
        return lines
    if gain.name == "arrival order":
        noise = f"{NOISE:.0%}".replace("%", " %")
        return [
            *lines,
            f"not worth it{' with the job as given' if analysis.searched else ''}: nothing tried is predicted to gain "
            f"{noise} over arrival order by token",
        ]
    condition = "" if gain.alone is None else ", with all parts above it in the last table"
    speeds = f"{gain.by_token:.3f} by token, {gain.equal_work:.3f} at equal work"
    return [*lines, f"better: {gain.name}{condition}: {speeds}"]


def _steadier(analysis: Analysis) -> list[str]:
    """What to choose if steps must be alike; nothing if those of the recommended settings are."""
    now, steadier = analysis.recommended, analysis.steadier
    if now.slowest <= STEADY:
        return []
    if steadier is None:
        return [f"steadier: none found; the slowest step takes {now.slowest:.2f} x arrival order's"]
    return [
        f"steadier: {steadier.flags or 'the defaults'} ({steadier.by_token / now.by_token:.2f} x as fast, slowest step "
        f"{steadier.slowest:.2f} x arrival order's, not {now.slowest:.2f} x)"
    ]


def _beside(setting: Found, analysis: Analysis) -> str:
    """Speed, and slowest step, over those of the job as set."""
    text = f"{setting.tokens_per_second * analysis.after.simulated.ns_per_token / 1e9:.2f} x as set"
    start = None if analysis.searched is None else analysis.searched.given
    return text if start is None else f"{text}, slowest step {setting.slowest / start.slowest:.2f} x"


def _ending(analysis: Analysis) -> list[str]:
    lines, ready = [], "flags"
    if analysis.weights_problem is not None:
        return ["flags: none recommended, because the weights do not fit (see above)"]
    memory, job = analysis.memory, analysis.job
    if analysis.fullest is not None:
        how = "documents in chunks" if memory.in_chunks else "whole documents"
        windows = f"windows up to {memory.window // job.micro_batch_size:,} ({how})"
        capacity = f"micro-batches up to {memory.micro_batch:,} tokens"
        if memory.window >= job.joined_window:
            capacity += f", {windows}"
        elif analysis.fits:  # of a lower Lmax than a job of this window has by itself
            capacity += f" ({how})"
        if not analysis.fits:
            takes = f"{capacity}, {windows}" if memory.micro_batch else windows
            ready = "flags, once it fits"
            lines.append(f"does not fit {memory.gib:g} GiB a GPU, which holds {takes}:")
            sizes = (
                "--tp, --cp, --pp or --expert-model-parallel-size"
                if job.model.shape.experts
                else "--tp, --cp or --pp"
            )
            lines.append(
                f"raise {sizes}, use --recompute full, or give --gpu-memory to plan as training would there"
            )
        else:
            lines.append(f"fits {memory.gib:g} GiB a GPU: {capacity}")
            if memory.micro_batch < analysis.capacity:
                lines.append("training would lower Lmax to that; --gpu-memory does so here")
    if (first := analysis.found) is not None:
        ready = "flags"
        place = "the search's first that fits"
        if analysis.fits:
            place = f"{_beside(first, analysis)}: the first of the search"
        flags = f"{first.flags} ({place}; your other flags stay)"
    else:
        flags = flags_of(analysis.best.config) or "none, the defaults do this"
    return [*lines, f"{ready}: {flags}", *_steadier(analysis)]


def _pair(statistics: dict[str, float], form: str) -> str:
    return f"{form.format(statistics['mean'])} / {form.format(statistics['max'])}"


def _share(key: str) -> Any:
    return lambda result: f"{result['waiting'][key]:+.3f}".replace("-0.000", "+0.000")


def _gain_row(gain: Gain) -> list[str]:
    alone = "" if gain.alone is None else f"{gain.alone:.3f}"
    speedups = [alone, f"{gain.by_token:.3f}", f"{gain.equal_work:.3f}"]
    return [gain.name, *speedups, f"{gain.slowest:.2f} x", f"{gain.fullest:.2f}"]
