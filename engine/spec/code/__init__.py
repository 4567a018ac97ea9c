"""Code that a spec names: entry points, and modules read as text."""
