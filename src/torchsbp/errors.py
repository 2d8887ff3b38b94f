"""What a user did wrong, apart from our own bugs: the command line prints these as one line."""


class UsageError(ValueError):
    """A user's mistake: what was found, what is allowed, what to do."""


class UsageTypeError(UsageError, TypeError):
    """A user's mistake: a value of the wrong type."""
