"""Running specs on the scripted backend with a tiny real tokenizer."""

from running_specs import fresh_spec_code, make_spec, run_spec, structs_checked

__all__ = ["fresh_spec_code", "make_spec", "run_spec", "structs_checked"]
