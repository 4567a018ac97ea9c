"""Text of specs: the tree of a YAML file with its positions, findings, and what fixes them."""
