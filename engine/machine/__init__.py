"""A spec's machine: presets, guards, one shared `transitions.Machine`, pictures."""
