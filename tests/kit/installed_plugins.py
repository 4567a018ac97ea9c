"""The plugins that are there: the core's tests hold without plugins too, and say which cases need one."""

from __future__ import annotations

import pytest

from engine.plugin import installed


def needs_plugin(name: str) -> pytest.MarkDecorator:
    """A test, or a case of one, that uses what the plugin adds."""
    return pytest.mark.skipif(name not in installed().plugins, reason=f"the plugin {name} is not installed here")
