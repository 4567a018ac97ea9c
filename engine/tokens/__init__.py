"""Tokens: the tape, chat formats, bridges between turns, and the parsing of replies.

    tape.py           one append-only tape of typed spans; everything else is derived from it
    conversation.py   messages in, exact prompts out: one tape per branch
    loading.py        load_format: from a spec's `model` to a chat format
    template.py       ChatTemplate: what every chat template has; what it can show, found by rendering
    views.py          messages as chat templates read them
    reply_parser.py   from sampled ids to content, reasoning and tool calls; every attempt at a call is kept
    reply_readers.py  the parsers of the library `renderers`, by family; Qwen3's format without it
    bridge/           the tokens between two turns, checked
    jinja_template.py the generic format: any chat template
    families.py       known model families, through the library `renderers`
    choosing.py       which reader parses a template's replies
    toolcalls.py      tool calls that are written as text, one class per format
    tokenizer.py      a tokenizer, called directly (plain_tokenizer.py, byte_level.py), and text that only
                      spells special tokens
    jinja.py          templates compiled as transformers does
    vision.py         how images become tokens (images.py); pixels.py scales them, in processes too
    vision_families.py  what differs between models with images: processors, and tokens of an image from its size alone
    image_bank.py     the images of a run by digest
    catalogue.py      models that have a name here

Nothing here talks to a model or to a spec's code.
"""
