"""FlexSP's released solver on the documents of flexsp_plans.py. Needs no package of this project.

git clone --branch flexsp https://github.com/PKU-DAIR/Hetu-Galvatron    # its solver runs unchanged
python -m venv ~/flexsp && ~/flexsp/bin/pip install pyscipopt pybind11
(cd Hetu-Galvatron/galvatron/flexsp_solver && PATH=~/flexsp/bin:$PATH make)
~/flexsp/bin/python scripts/bench/dynamic/flexsp_solver.py Hetu-Galvatron problems.json plans.json

As in its training, numbers of micro-batches from the least possible one are tried, and each micro-batch has 16 buckets
and 10 seconds of SCIP. FlexSP solves all of them at once in a pool of processes. Here they run one after the other, and
the limit is of processor time, so that a busy machine does not shorten it. Plans already in plans.json are kept.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import types
from pathlib import Path
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", type=Path, help="Hetu-Galvatron, branch flexsp, sequence_module built")
    parser.add_argument("problems", type=Path, help="written by flexsp_plans.py")
    parser.add_argument("plans", type=Path, help="JSON to write")
    parser.add_argument("--seconds", type=float, default=10.0, help="of SCIP for each micro-batch")
    parser.add_argument("--options", type=int, default=4, help="numbers of micro-batches tried")
    parser.add_argument("--buckets", type=int, default=16, help="of each micro-batch")
    parser.add_argument("--batches", type=int, default=1, help="global batches of each case, the first ones")
    options = parser.parse_args()
    _use_checkout(options.checkout)
    plans = json.loads(options.plans.read_text()) if options.plans.exists() else []
    solved = {(plan["corpus"], plan["window"], plan["batch"]) for plan in plans}
    problems = json.loads(options.problems.read_text())
    for batch in range(options.batches):
        for case in problems["cases"]:
            key = (case["corpus"], case["window"], batch)
            if key in solved:
                continue
            solution = solve(problems["gpus"], problems["rank_tokens"], case, case["batches"][batch], options)
            plans.append({"corpus": key[0], "window": key[1], "batch": batch} | solution)
            part = options.plans.with_suffix(".part")
            part.write_text(json.dumps(plans))
            os.replace(part, options.plans)
            print(*key, solution["tried"], f"{solution['seconds']:.0f} s", flush=True)


def solve(
    gpus: int, rank_tokens: int, case: dict[str, Any], lengths: list[int], options: Any
) -> dict[str, Any]:
    """micro_steps: of each micro-batch its groups as [degree, documents]; tried: by number of micro-batches, the time
    that FlexSP predicts, null where it found no plan; seconds: processor time; longest: of one SCIP problem."""
    from galvatron.flexsp_solver import (  # type: ignore[import-not-found]
        Sequence,
        flexSPCostModel,
        flexSPOptimizer,
    )
    from sequence_module import chunk_globalbatch  # type: ignore[import-not-found]

    prices = case["prices"]
    # No model states and 1 MB a token, so that the limit in GB is one in tokens.
    model = flexSPCostModel(
        cluster_size=gpus,
        hidden_size=prices["hidden_size"],
        layer_num=prices["layers"],
        param_size_B=0,
        act_per_token=1.0,
        cpt_alpha1=prices["alpha1"],
        cpt_alpha2=prices["alpha2"],
        cpt_beta1=prices["beta1"],
        alltoall_bandwidth_dict_gbs={int(degree): rate for degree, rate in prices["bandwidth"].items()},
    )
    solver = flexSPOptimizer(
        gpus,
        rank_tokens / 1024,
        model,
        hide_scipoutput=True,
        hide_alloutput=True,
        # Clock 1 counts the processor's time; FlexSP leaves SCIP's default, the wall clock.
        scip_param_dict={"limits/time": options.seconds, "timing/clocktype": 1},
    )
    if solver.device_token_capacity != rank_tokens:
        raise SystemExit(f"{rank_tokens} tokens a GPU are {solver.device_token_capacity} to FlexSP")
    began, longest = time.process_time(), 0.0
    best: tuple[float, Any] = (float("inf"), None)
    tried: dict[str, float | None] = {}
    whole = [Sequence(tokens, at) for at, tokens in enumerate(lengths)]
    least = solver.get_min_valid_microbatch_num(whole, "sort_consec")
    for count in range(least, least + options.options):
        groups, predicted = [], 0.0
        for part in chunk_globalbatch(list(whole), count, "sort_consec"):
            at = time.process_time()
            result = solver.solve_flexSP_bucket_seqs(part, bucket_num=options.buckets)
            longest = max(longest, time.process_time() - at)
            status = "no plan" if result is None else f"{result['M']:.1f} ms"
            print(f"  {count} micro-batches: {status} in {time.process_time() - at:.1f} s", flush=True)
            if result is None:
                break
            groups.append(
                [(degree, [sequence.id for sequence in held]) for degree, held in solver.show_results(result)]
            )
            predicted += result["M"]
        complete = len(groups) == count
        tried[str(count)] = round(float(predicted), 3) if complete else None
        if complete and predicted < best[0]:
            best = predicted, groups
    return {
        "lengths": lengths,
        "micro_steps": best[1],
        "tried": tried,
        "seconds": round(time.process_time() - began, 2),
        "longest": round(longest, 2),
        "buckets": options.buckets,
        "limit": options.seconds,
    }


def _use_checkout(path: Path) -> None:
    """Import galvatron.flexsp_solver from here without galvatron itself, which needs torch."""
    package = types.ModuleType("galvatron")
    package.__path__ = [str(path.resolve() / "galvatron")]
    sys.modules["galvatron"] = package


if __name__ == "__main__":
    main()
