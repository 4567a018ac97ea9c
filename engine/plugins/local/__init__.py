"""transformers in this process, with continuous batching."""
