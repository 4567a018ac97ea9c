"""The JSON Schemas of specs, scenarios and stored records, for editors: `engine schema`.

command.py       writes and compares the files
json_schema.py   the documents, from the data classes
"""

from engine.plugin import Plugin

PLUGIN = Plugin(
    name="schema",
    about="Writes the JSON Schemas of specs and stored records, for editors",
    commands={"schema": "engine.plugins.schema.command:schema"},
)
