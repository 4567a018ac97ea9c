"""The engine's own plugins: a folder each, with its face (`PLUGIN`), code, schemas, rules, commands and page in one place.

A folder may be deleted. What a spec then lacks is told by name, with what to install.
"""
