"""Static rules over a whole spec: one small function each.

for problem in check_spec(load_spec("specs/quickstart.yaml")):
    print(problem)
"""

from __future__ import annotations

from engine.validate.check import all_rules, check_spec, refuse_errors, refuse_first_tasks
from engine.validate.registry import Rule

__all__ = ["Rule", "all_rules", "check_spec", "refuse_errors", "refuse_first_tasks"]
