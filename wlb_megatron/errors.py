"""The project's one error for what a user can put right."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class WlbError(ValueError):
    """One line that names cause and cure. The command line prints it to stderr and exits with code 2."""


@contextmanager
def explain_bad_values() -> Iterator[None]:
    """Turns ValueErrors of set-up, which name the setting at fault, into WlbErrors."""
    try:
        yield
    except WlbError:
        raise
    except ValueError as error:
        raise WlbError(str(error)) from error
