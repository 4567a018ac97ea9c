"""The commands of the core, one file each."""
