"""Static rules over a whole spec: one small function each.

for problem in check_spec(load_spec("specs/quickstart.yaml")):
    print(problem)
"""

from __future__ import annotations

from engine.checks.registry import Rule, all_rules, check_spec

__all__ = ["Rule", "all_rules", "check_spec"]
