"""`python -m twinhull` is `twinhull`."""

from twinhull.cli import main

main()
