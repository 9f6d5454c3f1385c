"""--full-validation: every document of a validation or test set once an evaluation; several sets each for itself.

Megatron's own way there counts a loader's batches and cycles over it; with a single set it fails (0.16 to 0.20 take the
first element of a number). Here a set's iterations are known from its plan, the same on every rank.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from wlb_megatron.plugin.micro_batches.iterators import (
    EvaluationIterator,
    MicroBatchIterator,
    planned_iterator,
)


def wrap_evaluate(original: Callable[..., Any]) -> Callable[..., Any]:
    """evaluate() over as many iterations as cover the set once, where all of it is asked for."""
    signature = inspect.signature(original)

    def evaluate(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs).arguments
        iterators = arguments["data_iterator"]
        iterator = planned_iterator(iterators[0] if isinstance(iterators, list) else iterators)
        if isinstance(iterator, EvaluationIterator) and iterator.full:
            arguments["eval_iters"] = len(iterator)
        return original(**arguments)

    return evaluate


def wrap_cyclic_iter(original: Callable[..., Any]) -> Callable[..., Any]:
    """cyclic_iter() that leaves the plugin's iterator as it is: it begins again by itself."""

    def cyclic_iter(iterable: Any) -> Any:
        return iterable if isinstance(iterable, MicroBatchIterator) else original(iterable)

    return cyclic_iter
