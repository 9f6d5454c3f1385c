"""The project's one error for what a user can put right."""


class WlbError(ValueError):
    """One line that names cause and cure. The command line prints it to stderr and exits with code 2."""
