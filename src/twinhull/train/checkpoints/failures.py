"""What went wrong with a checkpoint, in one line.

DCP raises `CheckpointException`, which derives from BaseException and carries the failures of all ranks.
"""

from torch.distributed.checkpoint.api import CheckpointException

from twinhull.errors import CheckpointError

OF_DISK_OR_DCP = (OSError, RuntimeError, ValueError, AssertionError, CheckpointException)
MOST_LETTERS = 300  # of a reason; a model that does not fit names each of its tensors
EXPECTED = (CheckpointError, *OF_DISK_OR_DCP)  # anything else is a mistake of ours, or an interrupt


def reason(error: BaseException) -> str:
    """Why it failed; an interrupt that DCP has wrapped is raised as itself."""
    if isinstance(error, CheckpointException):
        inner = [failure for failure, _ in error.failures.values()]
        for failure in inner:
            if isinstance(failure, (KeyboardInterrupt, SystemExit)):
                raise failure
        return reason(inner[0]) if inner else "PyTorch does not say why"
    if isinstance(error, CheckpointError):
        return error.message.rstrip(".")
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return " ".join(str(error).split())[:MOST_LETTERS] or type(error).__name__
