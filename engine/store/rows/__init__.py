"""Training rows of stored episodes: what they are, how they are built, and their columns in files."""
