"""The web app of `engine view`, and its single file."""
