"""Findings for code scanning and as annotations of changes: `engine validate --format sarif`, `--format github`."""

from engine.plugin import Plugin

PLUGIN = Plugin(
    name="code_scanning",
    about="Findings as SARIF for code scanning, and as annotations of GitHub",
    findings_formats={
        "sarif": "engine.cli.validate.sarif:as_sarif",
        "github": "engine.cli.validate.sarif:as_github",
    },
)
