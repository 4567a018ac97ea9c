"""How many examples a property test takes."""

from __future__ import annotations

from hypothesis import settings


def examples(count: int) -> int:
    """`count` under a profile of 100 examples, and fewer in proportion under a smaller one; at least 10.

    The default run's profile is smaller than that of scripts/random_tests.sh: see tests/conftest.py.
    """
    return max(count * settings().max_examples // 100, min(count, 10))
