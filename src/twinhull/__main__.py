"""Where the command begins, for `twinhull` and `python -m twinhull`."""

import gc


def main() -> None:
    """Run the command line.

    The collector rests while it is imported: it would look through thousands of new classes again and again,
    14 ms of a start that should feel instant (bench/startup.py).
    """
    gc.disable()
    from twinhull import cli

    gc.freeze()
    gc.enable()
    cli.main()


if __name__ == "__main__":
    main()
