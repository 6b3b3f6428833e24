"""Random bit flips and clean steps under `--guard`. Run `python -m tests.bit_flips --help`."""
