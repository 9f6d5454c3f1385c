"""Where the time of training steps goes on a GPU: traces of Megatron's own profiler, compared.

python -m scripts.bench.training.step_trace out/equal/stock/torch_profile/rank-0.json.gz \\
    out/equal/wlb/torch_profile/rank-0.json.gz

Each is a run's with --profile --use-pytorch-profiler --profile-step-start A --profile-step-end B --tensorboard-dir D
(Megatron writes D/../torch_profile). Prints for each: milliseconds a step that kernels run, that none runs, by kernel,
and the longest gaps with the kernels around them.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

SHOWN = 28
"""Kernels of the table."""

Event = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("traces", type=Path, nargs="+")
    compare({path.parent.parent.name or str(path): path for path in parser.parse_args().traces})


def compare(traces: dict[str, Path]) -> None:
    """Print the table of traces by name."""
    costs_of = {}
    for name, path in traces.items():
        with gzip.open(path) as file:
            costs_of[name] = costs(json.load(file)["traceEvents"])
    head = "".join(f"{name:>16}" for name in costs_of)
    print(f"{'ms a step':66}{head}")
    for line in ("wall", "kernels", "idle", "copies beside"):
        print(f"{line:66}" + "".join(f"{trace_costs[line]:16.3f}" for trace_costs in costs_of.values()))
    names = {
        name: max(trace_costs["by_name"].get(name, (0, 0))[0] for trace_costs in costs_of.values())
        for trace_costs in costs_of.values()
        for name in trace_costs["by_name"]
    }
    for name in sorted(names, key=lambda name: (-names[name], name))[:SHOWN]:
        cells = [trace_costs["by_name"].get(name, (0.0, 0.0)) for trace_costs in costs_of.values()]
        print(f"  {name[:64]:64}" + "".join(f"{ms:9.3f} x {count:4.0f}" for ms, count in cells))
    for name, trace_costs in costs_of.items():
        print(f"longest gaps of {name} (ms, at ms of the step, after, before):")
        for gap, at, after, before in trace_costs["gaps"]:
            print(f"  {gap:8.3f} at {at:9.1f}: {after[:50]} -> {before[:50]}")


def costs(events: list[Event]) -> dict[str, Any]:
    """Milliseconds a step: wall, kernels (time that one runs), idle; of each kernel by name time and count; gaps."""
    spans = [e for e in events if e.get("ph") == "X" and str(e.get("name", "")).startswith("ProfilerStep")]
    steps = sorted((e for e in spans if e.get("cat") == "user_annotation"), key=lambda e: e["ts"])
    begin, end = steps[0]["ts"], steps[-1]["ts"] + steps[-1]["dur"]
    device = [e for e in events if e.get("cat") in ("kernel", "gpu_memset") and begin <= e["ts"] < end]
    device.sort(key=lambda e: e["ts"])
    by_name: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    gaps, busy, reached, last = [], 0.0, begin, "step"
    for event in device:
        cell = by_name[short(event["name"])]
        cell[0] += event["dur"] / 1e3 / len(steps)
        cell[1] += 1 / len(steps)
        start, stop = event["ts"], event["ts"] + event["dur"]
        if start > reached:
            since = max(s["ts"] for s in steps if s["ts"] <= start)
            gaps.append(((start - reached) / 1e3, (reached - since) / 1e3, last, short(event["name"])))
        busy += max(0.0, stop - max(start, reached))
        if stop > reached:
            reached, last = stop, short(event["name"])
    copies = sum(e["dur"] for e in events if e.get("cat") == "gpu_memcpy" and begin <= e["ts"] < end)
    wall, kernels = ((end - begin) / 1e3 / len(steps), busy / 1e3 / len(steps))
    return {
        "wall": wall,
        "kernels": kernels,
        "idle": wall - kernels,
        "copies beside": copies / 1e3 / len(steps),
        "by_name": {name: (ms, count) for name, (ms, count) in by_name.items()},
        "gaps": sorted(gaps, reverse=True)[:12],
    }


def short(name: str) -> str:
    """A kernel's name without what its templates and arguments add."""
    name = re.sub(r"^(void|std::enable_if<.*?>::type) ", "", name)
    return re.sub(r"\(anonymous namespace\)::|at::native::|transformer_engine::", "", name)[:90]


if __name__ == "__main__":
    main()
