"""Data sets for other trainers, made of a run: `engine export --format trl|verl`."""
