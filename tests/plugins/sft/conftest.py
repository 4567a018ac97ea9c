"""Specs on tiny vision-language models."""

from prepared_jobs import jobs_done
from vision_specs import make_spec, run_spec, vlm

__all__ = ["jobs_done", "make_spec", "run_spec", "vlm"]
