"""`engine validate` and `engine explain`, and the formats of findings: text and JSON."""
