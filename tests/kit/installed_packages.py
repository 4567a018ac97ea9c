"""Installed packages that offer environments, tools and more by entry points."""

from __future__ import annotations

from pathlib import Path

VAULTS = """\
[episode_engine.environments]
vault = vaults:Vault

[episode_engine.tools]
pick = vaults:pick

[episode_engine.users]
guard = vaults:Guard

[episode_engine.scorers]
opened = vaults:opened

[episode_engine.adapters]
lockgym = vaults:LockGym

[episode_engine.tool_adapters]
keyring = vaults:KeyRing
"""
"""Entry points with one of each kind."""


def install(site: Path, package: str, points: str, code: str = "raise SystemExit('it was imported')\n") -> None:
    """Write version 1.2 of a package with these entry points; its module must not be imported unless `code` is given."""
    info = site / f"{package}-1.2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(points)
    (site / f"{package}.py").write_text(code)
