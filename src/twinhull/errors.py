"""What a user can mend: every error says the thing, the value, the rule, the way out, and the place."""


class TwinhullError(Exception):
    """Base of all errors that end a command with one clear line instead of a traceback.

    `message` names the thing, its value and the rule; `hint` is the way out; `place` is a file position
    such as `shop.yaml:4:11`. `exit_code` is what the command leaves with.
    """

    exit_code = 2

    def __init__(self, message: str, *, hint: str = "", place: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.place = place

    def __str__(self) -> str:
        text = f"{self.place}  {self.message}" if self.place else self.message
        return f"{text} {self.hint}" if self.hint else text


class BrokerError(TwinhullError):
    """Raised when the broker cannot be found, started or reached."""


class CheckpointError(TwinhullError):
    """Raised when a checkpoint cannot be written, or none of those present can be trusted."""


class ModelRefused(TwinhullError):
    """Raised when a model version fails its hash, its load or its warm-up; the version before stays."""


class RunInUse(TwinhullError):
    """Raised when another process holds the run directory."""


class UserCodeError(TwinhullError):
    """Raised when the user's module cannot be imported or lacks the function that the file names."""
