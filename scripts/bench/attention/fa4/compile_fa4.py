"""Compile FlashAttention-4's kernels without a GPU into its cache on disk, for a machine whose time is dear.

    export FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1 FLASH_ATTENTION_CUTE_DSL_CACHE_DIR=DIR
    export FLASH_ATTENTION_ARCH=sm_90 CUTE_DSL_ARCH=sm_90a FLASH_ATTENTION_NUM_SMS=132
    python -m scripts.bench.attention.fa4.compile_fa4

The cache serves where these variables are set again, with the same versions of the packages and of Python. Compiled are
the kinds of calls that the attention benchmarks make (attention_cases.py), 10 to 15 s of a core each.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from scripts.bench.attention.attention_cases import CASES, CROWDED, Case
from wlb_megatron.attention.device_layout import DeviceCall
from wlb_megatron.attention.kernels.kernel_choice import kernels
from wlb_megatron.attention.pairs import side_by_side


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", help="names of cases (default: all)")
    args = parser.parse_args()
    if os.environ.get("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED") != "1":
        parser.error("set FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1, else nothing is kept")
    for case in CASES:
        if args.only and case.name not in args.only:
            continue
        for count in (8, 300) if case.name in CROWDED else (8,):
            for causal in (True,) if case.window is not None else (True, False):
                begin = time.perf_counter()
                try:
                    compile_one(case, causal, count)
                    outcome = f"{time.perf_counter() - begin:.1f} s"
                except Exception as error:
                    outcome = f"FAIL {type(error).__name__}: {str(error)[:300]}"
                print(
                    f"{case.name}, {'causal' if causal else 'rectangle'}, {count} sequences: {outcome}",
                    flush=True,
                )


def compile_one(case: Case, causal: bool, count: int) -> None:
    """Forward and backward on tensors that have shapes alone."""
    rows, v_dim = 8192, case.v_dim or case.dim
    backend = kernels("fa4", case.deterministic)
    if not backend.takes(case.dim, v_dim):
        v_dim = case.dim
    with FakeTensorMode():
        q, k, v = (
            torch.empty(rows, heads, dim, device="cuda", dtype=case.dtype)
            for heads, dim in ((case.heads, case.dim), (case.kv_heads, case.dim), (case.kv_heads, v_dim))
        )
        bounds = [torch.empty(count + 1, device="cuda", dtype=torch.int32) for _ in range(2)]
        call = DeviceCall(causal, case.window, *bounds, 4096, 4096, rows, rows, ())
        kv = side_by_side(k, v)
        out, lse = backend.forward(call, q, kv, 0.1)
        backend.backward(call, q, kv, out, lse, torch.empty_like(out), 0.1)


if __name__ == "__main__":
    sys.exit(main())
