"""What can go wrong that is not the program's fault."""


class UsageError(ValueError):
    """A user's mistake: what was found, what is allowed, what to do."""


class UsageTypeError(UsageError, TypeError):
    """A value of a wrong type."""
