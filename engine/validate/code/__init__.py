"""The code of a spec, read as text or imported: entry points, their signatures, what they name."""
