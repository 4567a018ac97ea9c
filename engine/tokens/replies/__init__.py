"""Replies: from sampled ids to content, reasoning and tool calls; every attempt at a call is kept, read or malformed.

parser.py       a reply as text, or by token where its family has a reader; the sampled tokens of a part of a reply
readers.py      the parsers of the library `renderers`, by family; Qwen3's format without it
"""
