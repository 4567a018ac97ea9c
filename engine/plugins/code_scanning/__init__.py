"""Findings for code scanning and as annotations of changes: `engine validate --format sarif`, `--format github`."""

from engine.plugin import Plugin

PLUGIN = Plugin(
    name="code_scanning",
    about="Findings as SARIF for code scanning, and as annotations of GitHub",
    findings_formats={
        "sarif": "engine.plugins.code_scanning.formats:as_sarif",
        "github": "engine.plugins.code_scanning.formats:as_github",
    },
)
