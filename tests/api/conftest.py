"""Running specs on the scripted backend with a tiny real tokenizer."""

from running_specs import fresh_spec_code, make_spec

__all__ = ["fresh_spec_code", "make_spec"]
