"""What each part of the plugin gains by itself and together: over arrival order, by simulated time."""

from __future__ import annotations

from dataclasses import dataclass, replace

from wlb_megatron.config import WlbConfig
from wlb_megatron.packing.factory import arrival_order
from wlb_megatron.simulator.job import Job

EVEN = "1.25"
"""A --wlb-batch-spread below the default, tried where whole documents wait."""


@dataclass(frozen=True, slots=True)
class Part:
    """alone: settings with this part and what it needs. together: also with all parts before it."""

    name: str
    alone: WlbConfig
    together: WlbConfig


def parts(config: WlbConfig, job: Job) -> list[Part]:
    """The parts that these settings leave open, in the order in which they are added."""
    plain = arrival_order(config)
    sharding = "adaptive" if config.sharding == "per-sequence" else config.sharding
    layout = job.model.layout
    settings = []
    if layout.context > 1:
        settings.append(("sharding of each document", replace(plain, sharding=sharding)))
    if not config.fixed_windows:
        base = replace(plain, packing="varlen")
        if layout.pipeline == 1:  # one micro-batch a window, no chunks: nothing that needs a flag
            base = replace(
                base, micro_batches_per_window=config.micro_batches_per_window, chunks=config.chunks
            )
        undelayed = replace(base, max_delay=0, thresholds="none")
        number = config.micro_batches_per_window
        settings.append(("packing of whole documents", undelayed))
        if _waits(config):
            settings.append(("delay of long documents", base))
        if layout.pipeline > 1 and number != "1" and config.release == "balance":
            settings.append(("number of micro-batches", replace(undelayed, micro_batches_per_window=number)))
            if config.chunks != "off" and not job.no_chunks(config):
                chunks = replace(base, micro_batches_per_window=number, chunks="on", overlong=config.overlong)
                # With chunks nothing waits, and flags that say how long are refused.
                chunks = replace(chunks, max_delay=None, thresholds="auto")
                settings.append(("long documents in chunks", chunks))
    else:
        settings.append(("packing in fixed windows", replace(config, sharding="per-sequence")))
    parts_kept: list[Part] = []
    for name, single in settings:
        both = single
        if name == "number of micro-batches" and "delay of long documents" in [
            part.name for part in parts_kept
        ]:
            both = replace(single, max_delay=config.max_delay, thresholds=config.thresholds)
        parts_kept.append(Part(name, single, replace(both, sharding=sharding)))
    return parts_kept


def _waits(config: WlbConfig) -> bool:
    """Whether long documents wait, unless they train in chunks."""
    return config.max_delay != 0 and config.thresholds != "none"


def others(config: WlbConfig, job: Job) -> list[tuple[str, WlbConfig]]:
    """Other settings, which may be better."""
    if config.fixed_windows or config.cp_mode == "dynamic":
        return []
    sharding = "adaptive" if config.sharding == "per-sequence" else config.sharding
    windows = replace(arrival_order(config), packing="fixed-greedy", sharding=sharding)
    settings = [("fixed windows, balanced", windows)]
    unchunked = config.chunks == "off" or job.model.layout.pipeline == 1
    if unchunked and config.batch_spread == "auto" and _waits(config):
        settings.append((f"steps of at most {EVEN} batches", replace(config, batch_spread=EVEN)))
    return settings
