"""What can go wrong in a run that is not the program's fault: printed as one message, without a traceback."""


class RunError(Exception):
    """The run can't go on; checkpoints written so far stay as they are."""


class DataError(RunError):
    """A sample can't be read, or the data are not what the configuration says."""


class CheckpointError(RunError):
    """A checkpoint can't be written, read, or does not belong to this model."""


class SignalError(Exception):
    """SIGTERM or SIGINT came; everything is saved."""
