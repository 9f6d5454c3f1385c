"""One training run of convergence.py: wlb_megatron.pretrain_gpt, whose test set is the validation documents cut anew.

The plugin evaluates on whole documents; with these windows, filled in arrival order and cut at their ends as plain
packing trains them, one run tells both losses, whatever packs its training.
"""

from __future__ import annotations

import dataclasses

from wlb_megatron.config import WlbConfig
from wlb_megatron.packing.fixed.batch_schedule import BatchSchedule
from wlb_megatron.plugin import pretrain_gpt
from wlb_megatron.plugin.flags.training_job import TrainingJob
from wlb_megatron.plugin.plans import source


def main() -> None:
    opened = source.open_sources

    def open_with_cut_windows(job: TrainingJob, config: WlbConfig) -> dict[str, source.Source]:
        parts = opened(job, config)
        plain = dataclasses.replace(config, packing="original")
        windows = source.open_part(job, plain, "valid", BatchSchedule.constant(job.batches.evaluated))
        assert windows is not None
        return {**parts, "test": windows}

    source.open_sources = open_with_cut_windows
    pretrain_gpt.main()


if __name__ == "__main__":
    main()
