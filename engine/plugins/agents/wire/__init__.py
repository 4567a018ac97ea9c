"""Model APIs that agent programs speak, translated to and from the engine's messages. One file each; no I/O."""
