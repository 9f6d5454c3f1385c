"""Entry: `python -m wlb_megatron.launch pretrain_gpt.py ...`, and its --wlb-dry-run."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from types import SimpleNamespace

from wlb_megatron.errors import fatal
from wlb_megatron.plugin.launch import main
from wlb_megatron.refusals import DryRunPassed, Refused


def run_or_check(run: Callable[[], None]) -> None:
    """Runs the training script, or with --wlb-dry-run only checks its flags and exits."""
    if "--wlb-dry-run" in sys.argv:
        sys.exit(dry_run(sys.argv[1:], run))
    run()


def dry_run(arguments: Sequence[str], run: Callable[[], None]) -> int:
    """Megatron's own parser and the plugin's refusals, as for that many GPUs, then `analyze` of the same flags.

    `arguments` are this process's, `run` is the training script up to where its flags are checked. Returns the exit
    code.
    """
    world = _world_size(arguments)
    if world is None:
        print(
            fatal("--wlb-dry-run needs --wlb-world-size, the GPUs of the job: a whole number from 1"),
            file=sys.stderr,
        )
        return 2
    if int(os.environ.get("RANK", "0")) > 0:
        return 0  # rank 0 speaks for all
    os.environ.update(WORLD_SIZE=str(world), RANK="0", LOCAL_RANK="0")
    _stand_in_for_gpu()
    try:
        run()
    except DryRunPassed:
        return _predict(arguments, world)
    except Refused as refused:
        print(refused, file=sys.stderr)
        return 2
    print(fatal("the script ended before Megatron had checked its flags"), file=sys.stderr)
    return 2


def _stand_in_for_gpu() -> None:
    """Where there is none, Megatron's checks of the GPU see an H100."""
    import torch

    if not torch.cuda.is_available():
        properties = SimpleNamespace(
            name="NVIDIA H100", major=9, minor=0, total_memory=80 << 30, multi_processor_count=132
        )
        torch.cuda.get_device_properties = lambda *_, **__: properties  # type: ignore[assignment]
        torch.cuda.get_device_capability = lambda *_, **__: (9, 0)


def _predict(arguments: Sequence[str], world: int) -> int:
    from wlb_megatron.cli import main as command

    flags = [word for word in arguments if word.startswith("-") or not word.endswith(".py")]
    command_line = ["analyze", "--no-split", "--search", "none", "--world-size", str(world)]
    if not any(word.split("=")[0] == "--wlb-gpu-memory" for word in arguments):
        command_line += ["--gpu-memory", "80"]
    code = command([*command_line, "--", *flags])
    if not code:
        print(
            f"> wlb_megatron: Megatron and the plugin take these flags on {world} GPU{'s' * (world > 1)}. Not checked: "
            "kernels, checkpoints, tokenizer. Other settings: wlb-megatron analyze -- <the same command>"
        )
    return code


def _world_size(arguments: Sequence[str]) -> int | None:
    """By the flag, which the last one says as in argparse, else by the launcher."""
    words = [part for word in arguments for part in word.split("=", 1)]
    values = [value for flag, value in pairwise(words) if flag == "--wlb-world-size"]
    text = values[-1] if values else os.environ.get("WORLD_SIZE", "")
    return int(text) if text.isdigit() and int(text) else None


if __name__ == "__main__":
    run_or_check(main)
