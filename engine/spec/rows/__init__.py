"""Rows of tasks: of files, data sets, code and mixes."""
