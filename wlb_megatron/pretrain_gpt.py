"""Entry: `python -m wlb_megatron.pretrain_gpt <Megatron's flags> [--wlb-...]`."""

from wlb_megatron.launch import run_or_check
from wlb_megatron.plugin.pretrain_gpt import main

if __name__ == "__main__":
    run_or_check(main)
