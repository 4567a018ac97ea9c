"""Runs Python as another user than root, with this interpreter and these packages, although only root may read them where they are."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import engine

NOBODY = 65_534
_SCRIPT = """
mount --bind "$1" "$2/python" && mount --bind "$3" "$2/engine" && cd "$2" || exit 99
here="$2"; shift 3
exec setpriv --reuid 65534 --regid 65534 --clear-groups --inh-caps -all "$here/python/bin/python3" "$@"
"""
"""Binds the interpreter and the engine to a folder that everybody can read, in a mount namespace that ends with the program."""


@contextmanager
def other_user(place: str = "/var/tmp") -> Iterator[OtherUser]:
    """The user nobody, with a folder of his own in a place; skips where this is not possible."""
    if os.getuid() != 0:
        pytest.skip("the engine's user is not root here, so the tests of its own user are these")
    folder = Path(tempfile.mkdtemp(prefix="other-", dir=place))
    try:
        yield OtherUser(folder)
    finally:
        shutil.rmtree(folder)


class OtherUser:
    """Runs programs as nobody."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "home"
        self._root = folder
        folder.chmod(0o755)
        for name in ("python", "engine"):
            (folder / name).mkdir()
        self.folder.mkdir()
        self.temporary = folder / "temporary"
        self.temporary.mkdir()
        os.chown(self.temporary, NOBODY, NOBODY)
        self.own()

    def own(self) -> None:
        """Give him what was written to his folder."""
        for path in (self.folder, *self.folder.rglob("*")):
            os.chown(path, NOBODY, NOBODY, follow_symlinks=False)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start Python with arguments, in his folder."""
        packages = [entry for entry in sys.path if entry.endswith("site-packages")]
        env = {
            "PATH": f"{self._root}/python/bin:{os.environ['PATH']}",
            "HOME": str(self.folder),
            "PYTHONPATH": ":".join([str(self._root / "engine"), *packages]),
        }
        env |= {"TMPDIR": str(self.temporary), "PYTHONDONTWRITEBYTECODE": "1"}
        line = [
            "unshare",
            "--mount",
            "--propagation",
            "private",
            "/bin/sh",
            "-c",
            _SCRIPT,
            "sh",
            sys.base_prefix,
            str(self._root),
        ]
        source = str(Path(engine.__file__).parents[1])
        return subprocess.Popen(
            [*line, source, *arguments], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def run(self, *arguments: str) -> str:
        """Run Python with arguments to its end; what it prints.

        Raises:
            AssertionError: It failed.
        """
        with self.start(*arguments) as process:
            output, _ = process.communicate(timeout=120)
        assert process.returncode == 0, output
        return output
