"""Files are opened below a few folders alone, by where their links lead, and only regular ones."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.spec.access import Access, OutsideError


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """work/specs/s.yaml, work/rows, outside/secret; work is the current folder."""
    for folder in ("work/specs", "outside"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "work/specs/s.yaml").write_text("spec")
    (tmp_path / "work/rows").write_text("rows")
    (tmp_path / "outside/secret").write_text("secret")
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path


def test_what_lies_below_the_specs_and_the_current_folder_is_read(tree: Path) -> None:
    access = Access.for_spec(Path("specs/s.yaml"))
    assert access.read(Path("specs/s.yaml"), 10) == b"spec"
    assert access.read(Path("specs/../rows"), 10) == b"rows"
    assert access.read(Path("rows"), 3) is None
    assert not access.imports


@pytest.mark.parametrize(
    "name", ["../outside/secret", "link", "folder/secret", "specs/../../outside/secret", "/etc/hostname"]
)
def test_what_lies_elsewhere_is_not(tree: Path, name: str) -> None:
    Path("link").symlink_to("../outside/secret")
    Path("folder").symlink_to("../outside")
    access = Access.for_spec(Path("specs/s.yaml"))
    assert not access.allows(Path(name))
    assert not access.is_file(Path(name))
    with pytest.raises(OutsideError):
        access.open(Path(name))


def test_an_allowed_folder_is_read(tree: Path) -> None:
    Path("link").symlink_to("../outside/secret")
    access = Access.for_spec(Path("specs/s.yaml"), [Path("../outside")])
    assert access.read(Path("link"), 10) == b"secret"
    assert Access.for_spec(Path("specs/s.yaml")).below(tree / "outside").read(Path("link"), 10) == b"secret"


def test_a_specs_folder_is_where_it_is_named_and_a_link_to_a_spec_does_not_move_it(tree: Path) -> None:
    (Path("specs") / "linked.yaml").symlink_to(tree / "outside" / "secret")
    access = Access.for_spec(Path("specs/linked.yaml"))
    with pytest.raises(OutsideError):
        access.open(Path("specs/linked.yaml"))


def test_the_root_is_no_folder_unless_it_is_allowed(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    named = tree / "work" / "specs" / "s.yaml"
    assert not Access.for_spec(named).allows(tree / "outside" / "secret")
    assert not Access.for_spec(Path("/spec.yaml")).allows(Path("/etc/hostname"))
    assert Access.for_spec(Path("/spec.yaml")).allows(Path("/spec.yaml"))
    assert Access.for_spec(named, [Path("/")]).allows(tree / "outside" / "secret")


def test_only_regular_files_are_opened(tree: Path) -> None:
    access = Access.for_spec(Path("specs/s.yaml"), [Path("/dev")])
    os.mkfifo("pipe")
    Path("circle").symlink_to("circle")
    for name in ("pipe", "specs", "/dev/zero", "circle", "none", "a" * 5000):
        with pytest.raises(OSError, match=r"\w") as caught:
            access.open(Path(name))
        assert not isinstance(caught.value, OutsideError)
    with pytest.raises(ValueError, match="null"):
        access.open(Path("a\0b"))


def test_without_folders_anything_is_read(tree: Path) -> None:
    assert Access().read(Path("../outside/secret"), 10) == b"secret"
    assert Access().below(Path("specs")) == Access()
    assert Access().imports
