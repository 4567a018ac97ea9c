"""Tokens: the tape, chat formats, bridges between turns, and the parsing of replies.

    tape.py          one append-only tape of typed spans; everything else is derived from it
    conversation.py  messages in, exact prompts out: one tape a branch
    format.py        ChatFormat: what a model's chat format can do; load_format
    families.py      known families, through the library `renderers`
    template.py      any other chat template, through a bridge that is proved
    proof.py         what is proved about a bridge, and what is assumed
    wrapper.py       what a template puts around messages, remembered
    tokenizer.py     a tokenizer, called directly
    loading.py       from a spec's `model` to a format
    toolcalls.py     tool calls that are written as text

Nothing here talks to a model or a world.
"""
