"""Bridges: the tokens between two turns, checked against the chat template before they are used.

bridge.py       the bridge that continues a tape, or the reason why there is none
wrapper.py      what a template writes around messages, kept, so that a turn does not render; the text of a tape
check.py        what is checked about a bridge, on probes, and the making of what wrapper.py keeps
keys.py         what a template tests of a conversation, read from its source (expressions.py, reading.py)
guard.py        every finished branch compared with what the template writes, in another process (guard_child.py)
"""
