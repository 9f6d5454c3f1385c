"""Entry: `python -m wlb_megatron.launch pretrain_gpt.py ...`."""

from wlb_megatron.plugin.launch import main

if __name__ == "__main__":
    main()
