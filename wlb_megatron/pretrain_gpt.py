"""Entry: `python -m wlb_megatron.pretrain_gpt <Megatron's flags> [--wlb-...]`."""

import sys

from wlb_megatron.launch import dry_run
from wlb_megatron.plugin.pretrain_gpt import main

if __name__ == "__main__":
    if "--wlb-dry-run" in sys.argv:
        sys.exit(dry_run(sys.argv[1:], main))
    main()
