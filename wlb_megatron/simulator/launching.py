"""Models the host's launches in a step of one pipeline stage: where the device waits for them.

Launches run ahead of the device, one layer after the other, so the device's work hides them. But a step starts with
neither ahead. So does each backward, because Megatron checks each loss on the host (its rerun state machine), which
waits for the forward. Micro-batches too short for their launches then take the host's time, forward and backward
together.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


class Launches(NamedTuple):
    """Host nanoseconds, float[n, m] or broadcastable to it.

    A micro-batch's forward and backward launches. For the backward also the check of the loss and its launches, which
    come first and keep the device waiting.
    """

    forward: FloatArray
    backward: FloatArray
    loss: float


def queued_ends(forward: FloatArray, backward: FloatArray, host: Launches) -> FloatArray:
    """float[n]: when each of n steps is done. forward, backward: float[n, m], the device's times of its
    micro-batches.

    Example: two micro-batches of 3 + 6 on the device, with launches of 4 + 2. The first forward ends at 4; then 6;
    then a forward of 3, whose launches the host began 4 earlier; then 6. In all 19, while the device alone takes 18.
    """
    n, count = forward.shape
    launches = [np.broadcast_to(ns, (n, count)) for ns in host[:2]]
    device = launched = np.zeros(n)
    for at in range(count):
        launched = launched + launches[0][:, at]
        device = np.maximum(np.maximum(device, launched - launches[0][:, at]) + forward[:, at], launched)
        begin = device + host.loss  # the loss was checked, so the host has launched nothing ahead
        launched = device + launches[1][:, at]
        device = np.maximum(begin + backward[:, at], launched)
    return device
