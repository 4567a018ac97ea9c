"""The engine's own plugins: a folder each, with its face (`PLUGIN`), code, schemas, rules, commands and page in one
place.

A folder may be deleted. A spec that uses the plugin then gets one error, which names the plugin and the command that
installs it.
"""
