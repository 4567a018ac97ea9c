"""Code that a library could replace and that is written by hand only because it is faster.

Each file states the library call that it must agree with, and a test compares the two. `bench/fast.py` measures what each file
saves; docs/performance.md has the figures. A file that saves less than 3 % of a turn, or of the start of a run, is removed.

    ascii.py            splits ASCII text as the tokenizer splits it, and keeps the ids of the pieces
    byte_level.py       decodes ids of byte-level vocabularies
    jinja.py            compiles chat templates as transformers does, without importing it
    plain_tokenizer.py  reads tokenizer folders as transformers does, without importing it
    qwen_replies.py     parses replies in Qwen3's format from their ids
    wrapper.py          keeps the tokens that a template puts around messages
    reply_text.py       keeps the text that a template puts around the parts of a reply

Nothing here imports other modules of the engine.
"""
