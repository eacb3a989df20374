"""What does one start from? `twinhull init` writes a small working system: its file, its code and a test."""

from importlib.resources import files
from pathlib import Path

from twinhull.errors import TwinhullError

# The test is kept under another name, for pytest would take it for one of ours.
_FILES = {"delivery.yaml": "delivery.yaml", "app.py": "app.py", "test_app.py": "test_app.txt"}
_NEXT = """\
wrote {names} in {directory}

next:
  cd {directory}
  twinhull check delivery.yaml
  python -m pytest
  twinhull up delivery.yaml

and, while it is up:
  curl -d '{{"km": 3.2, "rush": true}}' http://127.0.0.1:7474/minutes"""


def init(directory: Path) -> int:
    """Write the starter system into a directory, made if missing; the exit code is 0.

    Raises TwinhullError, and leaves nothing behind, if one of the files is there or cannot be written.
    """
    present = [name for name in _FILES if (directory / name).exists()]
    if present:
        raise TwinhullError(
            f"{directory} has {', '.join(present)} already, and nothing is overwritten.",
            hint="Name another directory.",
        )
    written: list[Path] = []
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, template in _FILES.items():
            with (directory / name).open("x", encoding="utf-8") as file:
                written.append(directory / name)
                file.write((files("twinhull.system") / "templates" / template).read_text(encoding="utf-8"))
    except OSError as error:
        for path in written:
            path.unlink()
        reason = error.strerror or str(error)
        raise TwinhullError(f"{directory} cannot be written: {reason}.", hint="Name another.") from error
    print(_NEXT.format(names=", ".join(_FILES), directory=directory))
    return 0
