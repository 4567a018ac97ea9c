"""Where `engine view` is found: the same port and token at the next start."""

from __future__ import annotations

from pathlib import Path

from engine.plugins.view.web import bind, open_place, stored_token


def port_of(out: Path, port: int | None = None) -> int:
    """The port that a start gets."""
    with open_place(port, out) as place:
        return int(place.getsockname()[1])


def test_a_folder_has_one_port_and_another_one_while_that_is_in_use(tmp_path: Path) -> None:
    port = port_of(tmp_path)
    assert port_of(tmp_path / "x" / "..") == port
    assert port_of(tmp_path / "x") != port
    assert port_of(tmp_path, 0) != port
    with bind(port):
        assert port_of(tmp_path) != port


def test_the_token_is_kept_as_long_as_nobody_else_can_read_it(cache: Path) -> None:
    token = stored_token()
    assert len(token) == 32
    assert stored_token() == token
    file = cache / "view-token"
    assert file.stat().st_mode & 0o777 == 0o600
    file.chmod(0o644)
    assert stored_token() != token
    file.write_text("short")
    assert len(stored_token()) == 32
