"""Workload-balanced packing and context parallelism for Megatron-LM.

`enable()` and `WlbConfig` are for users' scripts. All other names may change between releases.
"""

from wlb_megatron.config import WlbConfig

__all__ = ["WlbConfig", "enable"]
__version__ = "0.1.0"


def enable() -> None:
    """Replace Megatron's symbols by the plugin's: what the launcher does, for a training script of your own.

    Call it before the script parses its arguments, before or after its Megatron imports. SystemExit with one line where
    this Megatron is too old, or lacks what the plugin replaces.
    """
    from wlb_megatron.plugin.launch import enable as install

    install()
