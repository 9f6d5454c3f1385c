"""`wlb-megatron watch`: a run as its --wlb-log tells it, on a terminal or as a page."""
