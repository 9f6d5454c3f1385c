"""Entry: `python -m wlb_megatron.pretrain_hybrid <Megatron's flags> [--wlb-...]`."""

import sys
from functools import partial

from wlb_megatron.launch import dry_run
from wlb_megatron.plugin.pretrain_gpt import main

if __name__ == "__main__":
    run = partial(main, "pretrain_hybrid")
    if "--wlb-dry-run" in sys.argv:
        sys.exit(dry_run(sys.argv[1:], run))
    run()
