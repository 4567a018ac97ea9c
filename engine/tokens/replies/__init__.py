"""Replies: from sampled ids to content, reasoning and tool calls; every attempt at a call is kept, read or malformed.

parser.py       a reply as text, or by token where its family has a reader
readers.py      the parsers of the library `renderers`, by family
qwen.py         replies in Qwen3's format, faster
arguments.py    arguments that are written between tags
parts.py        the sampled tokens of a part of a reply
"""
