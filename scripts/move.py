"""Moves a module, a page or a folder, and rewrites what names it.

    python scripts/move.py engine/tokens/proof.py engine/tokens/bridge/check.py
    python scripts/move.py engine/notices engine/plugins/notices

Rewritten in all text files that git tracks: imports, dotted names (entry points, tests that patch, package data), paths, links
of Markdown pages, and links of the file system. Then ruff sorts the imports and formats what changed. Nothing is committed, and a checkout with changes is refused: one move is
one commit that this script made. What it cannot know is printed: names that are put together at run time, and `__file__`.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

UNTOUCHED = re.compile(r"tests/goldens/.*\.(?!py$)\w+$|scripts/move\.py$|tests/test_move\.py$")
"""Recorded bytes, and the examples of this script."""
LINKED = ("schemas", "environments")
"""Folders at the top that are imported as `engine.NAME`."""
_LINK = re.compile(r"(?<=\]\()([^)\s#:]+)(?=[)#])")
_COLLAPSED = (
    "--config=format.skip-magic-trailing-comma=true",
    "--config=lint.isort.split-on-trailing-comma=false",
)
"""Where a file leaves no list broken that fits its line, none is left so: else a line that was broken for a longer name would
stay broken when the name is short again."""


class Move:
    """One move in one checkout.

    Args:
        root: The checkout.
        old: What moves, relative to the root.
        new: Where to.
    """

    def __init__(self, root: Path, old: str, new: str) -> None:
        self._root = root
        self.old, self.new = PurePosixPath(old), PurePosixPath(new)
        self._tracked = self._git("ls-files", "-z").split("\0")[:-1]
        self.is_folder = (root / old).is_dir()
        self.files = [path for path in self._tracked if path == old or path.startswith(f"{old}/")]

    def problem(self) -> str | None:
        """Why this move is refused; None where it is not."""
        if self._git("status", "--porcelain", "--untracked-files=no"):
            return "the checkout has changes: commit them first, so that the move is a commit of its own"
        if not self.files:
            return f"{self.old} is not tracked by git"
        if (self._root / self.new).exists():
            return f"{self.new} exists already"
        if self.old.suffix != self.new.suffix:
            return "a file moves to a file, and a folder to a folder"
        above = [folder for folder in self.new.parents if folder.name]
        if dotted(self.old) and (bare := [f for f in above if not (self._root / f / "__init__.py").exists()]):
            return f"{bare[-1]}/__init__.py is missing: write it first, in a commit of its own"
        room = self.old.stem if self.old.parts[:-1] == ("engine",) else ""
        if re.search(rf'^  "{room}",$', (self._root / "pyproject.toml").read_text(), re.M):
            return f'pyproject.toml names a layer "{room}": write "({room})" first, in a commit of its own'
        return None

    def run(self) -> list[str]:
        """Moves and rewrites; what to look at by hand, one line each."""
        check = ("format", "--check", "--output-format", "concise", _COLLAPSED[0])
        with_commas = {self.moved(path) for path in self._ruff(*check, *self._python(self._tracked))}
        links = {
            path: str((self._root / path).readlink()) for path in self._tracked if (self._root / path).is_symlink()
        }
        (self._root / self.new).parent.mkdir(parents=True, exist_ok=True)
        self._git("mv", str(self.old), str(self.new))
        self._relink(links)
        changed: list[str] = []
        notes: list[str] = []
        for path in [self.moved(path) for path in self._tracked if path not in links and not UNTOUCHED.match(path)]:
            try:
                text = (self._root / path).read_bytes().decode()
            except UnicodeDecodeError:
                continue
            if "\0" in text:
                continue
            rewritten = self.rewrite(path, text)
            notes += self._unsure(path, rewritten)
            if rewritten != text:
                (self._root / path).write_bytes(rewritten.encode())
                changed.append(path)
        for config, paths in (
            (_COLLAPSED, [path for path in self._python(changed) if path not in with_commas]),
            ((), [path for path in self._python(changed) if path in with_commas]),
        ):
            if paths:
                self._ruff("check", "--select", "I", "--fix", *config[1:], *paths)
                self._ruff("format", *config[:1], *paths)
        self._git("add", "--all", "--", *changed, *map(self.moved, links))
        return notes

    def moved(self, path: str) -> str:
        """Where a file is after the move."""
        return str(self.new / PurePosixPath(path).relative_to(self.old)) if path in self.files else path

    def rewrite(self, path: str, text: str) -> str:
        """The text of a file with the new names.

        Args:
            path: Where the file is after the move.
        """
        if path.endswith(".md"):
            text = _LINK.sub(lambda match: self._link(path, match[1]), text)
        before, after = dotted(self.old), dotted(self.new)
        if before and after:
            if path.endswith(".py"):
                text = self._imports(text, before, after)
            if before in text:
                text = re.sub(rf"(?<![\w.]){re.escape(before)}(?!\w)", after, text)
        for here, there in self._paths():
            if here in text:
                text = re.sub(rf"(?<![\w/-])((?:\.\.?/)*){re.escape(here)}(?![\w-]|\.\w)", rf"\g<1>{there}", text)
        return text

    def _paths(self) -> list[tuple[str, str]]:
        """The ways in which a path names what moved: from the root, and from `engine/` for its files."""
        pairs = [(str(self.old), str(self.new))]
        for top in LINKED:
            if self.old.parts[0] == top:
                pairs.append(
                    (f"engine/{self.old}", str(self.new) if dotted(self.new) is None else f"engine/{self.new}")
                )
        if {self.old.parts[0], self.new.parts[0]} == {"engine"}:
            pairs += [
                (path.removeprefix("engine/"), self.moved(path).removeprefix("engine/"))
                for path in self.files
                if path.count("/") > 1
            ]
        return pairs

    def _link(self, page: str, link: str) -> str:
        """A relative link of a page, which may have moved itself, to a target that may have moved."""
        old_page = (
            str(self.old / PurePosixPath(page).relative_to(self.new))
            if PurePosixPath(page).is_relative_to(self.new)
            else page
        )
        target = os.path.normpath(PurePosixPath(old_page).parent / link)
        if target != str(self.old) and target not in self.files and page == old_page:
            return link
        if not (target in self._tracked or any(path.startswith(f"{target}/") for path in self._tracked)):
            return link
        inside = target == str(self.old) or target.startswith(f"{self.old}/")
        there = self.new / PurePosixPath(target).relative_to(self.old) if inside else PurePosixPath(target)
        return os.path.relpath(there, PurePosixPath(page).parent) + ("/" if link.endswith("/") else "")

    def _relink(self, links: dict[str, str]) -> None:
        """Points links of the file system at what moved, and moved links at what they pointed at."""
        for path, target in links.items():
            there = os.path.normpath(PurePosixPath(path).parent / target)
            inside = there == str(self.old) or there.startswith(f"{self.old}/")
            if inside:
                there = str(self.new / PurePosixPath(there).relative_to(self.old))
            link = self._root / self.moved(path)
            wanted = os.path.relpath(there, PurePosixPath(self.moved(path)).parent)
            if wanted != target:
                link.unlink()
                link.symlink_to(wanted)

    def _imports(self, text: str, before: str, after: str) -> str:
        """`from PACKAGE import MODULE`, where the module moved, as an import of its own."""
        package, _, name = before.rpartition(".")
        if f"from {package} import" not in text:
            return text
        new_package, _, new_name = after.rpartition(".")
        lines = text.splitlines(keepends=True)
        for node in sorted(ast.walk(ast.parse(text)), key=lambda node: -getattr(node, "lineno", 0)):
            if (
                not isinstance(node, ast.ImportFrom)
                or node.module != package
                or name not in (a.name for a in node.names)
            ):
                continue
            indent = lines[node.lineno - 1][: node.col_offset]
            end = node.end_lineno or node.lineno
            comment = lines[end - 1][node.end_col_offset :]
            others = [ast.unparse(alias) for alias in node.names if alias.name != name]
            statements = [f"from {package} import {', '.join(others)}"] if others else []
            for alias in node.names:
                if alias.name == name:
                    local = alias.asname or name
                    suffix = "" if local == new_name else f" as {local}"
                    statements.append(f"from {new_package} import {new_name}{suffix}")
            lines[node.lineno - 1 : end] = [f"{indent}{statement}{comment}" for statement in statements]
        return "".join(lines)

    def _unsure(self, path: str, text: str) -> list[str]:
        """What this script does not rewrite."""
        notes = []
        if PurePosixPath(path).is_relative_to(self.new) and path.endswith(".py") and re.search(r"\b__file__\b", text):
            notes.append(f"{path}: uses __file__, whose folder is another one now")
        parent = (dotted(self.old) or "").rpartition(".")[0]
        if parent and path.endswith(".py"):
            lines = text.splitlines()
            notes += [
                f"{path}:{number}: a name is put together at run time: {line.strip()}"
                for number, line in enumerate(lines, 1)
                if f"{parent}.{{" in line
            ]
        return notes

    def _python(self, paths: Sequence[str]) -> list[str]:
        return [path for path in paths if path.endswith(".py")]

    def _git(self, *arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=self._root, capture_output=True, text=True, check=True).stdout

    def _ruff(self, *arguments: str) -> list[str]:
        """Runs ruff; the files that a check of the format names."""
        command = [sys.executable, "-m", "ruff", *arguments]
        ended = subprocess.run(command, cwd=self._root, capture_output=True, text=True, check=False)
        if ended.returncode > 1:
            raise SystemExit(ended.stderr)
        return re.findall(r"^(.+?):\d+:\d+: unformatted", ended.stdout, re.M)


def dotted(path: PurePosixPath) -> str | None:
    """The name that a module or package of the engine is imported by; None for other files."""
    if path.suffix not in ("", ".py") or path.parts[0] not in ("engine", *LINKED):
        return None
    name = ".".join(path.with_suffix("").parts)
    return name if path.parts[0] == "engine" else f"engine.{name}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", help="what moves, from the root of the checkout")
    parser.add_argument("new", help="where to")
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent, help="the checkout")
    options = parser.parse_args(arguments)
    move = Move(options.root, options.old.rstrip("/"), options.new.rstrip("/"))
    if problem := move.problem():
        parser.error(problem)
    for note in move.run():
        print(note)
    return 0


if __name__ == "__main__":
    sys.exit(main())
