"""What can go wrong that is not the program's fault: the command line tells it in one message, without a traceback."""


class UsageError(ValueError):
    """What the user asked for is not possible; the message says what is."""


class UsageTypeError(UsageError, TypeError):
    """An argument is of a type that is not understood."""


class RunError(Exception):
    """The run can't go on; checkpoints written so far stay as they are."""


class DataError(RunError):
    """A sample can't be read, or the data are not what the configuration says."""


class CheckpointError(RunError):
    """A checkpoint can't be written, read, or does not belong to this model."""


class SignalError(Exception):
    """SIGTERM or SIGINT came; everything is saved."""
