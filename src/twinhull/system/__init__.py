"""Describe: text becomes one `System`, whatever it was written in."""
