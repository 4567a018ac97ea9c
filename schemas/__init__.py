"""The public data classes: no I/O, no torch, no import of other engine modules."""
