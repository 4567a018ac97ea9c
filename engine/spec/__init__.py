"""The spec: read with positions kept, put together, validated, and made useful to the rest."""
