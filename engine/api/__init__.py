"""The Python API: what `from engine import …` gives. The command line is built on it."""
