"""Whether a machine can run what a spec asks for: `engine doctor`."""
