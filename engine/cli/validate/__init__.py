"""`engine validate`: examining specs in child processes, and reports as text, JSON and SARIF."""
