"""Models that see, for a critic of one."""

from vision_specs import make_spec, run_spec, vlm

__all__ = ["make_spec", "run_spec", "vlm"]
