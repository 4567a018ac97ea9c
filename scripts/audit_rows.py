"""Make rows with the code of verl, TRL, slime, SkyRL and AReaL, audit them, and write the table of docs/rows.md.

    python scripts/audit_rows.py make --tokenizers FOLDER --out ROWS --python verl=…/python --python trl=…/python
    python scripts/audit_rows.py page --out ROWS

`make` runs `scripts/audit_frameworks/<framework>_rows.py` with the Python of each framework's own environment, on a CPU. Each maker replaces only the model's
sampling, by a script whose replies are the same for every framework (`scripted.py`), and writes rows in the framework's own files. slime is read from a checkout:
`SLIME_SOURCE=CHECKOUT`. FOLDER has tokenizers with their chat templates (`scripts/fetch_tokenizers.sh`).

`page` audits the rows, with the sampler's record, and replaces the part of scripts/docs/rows.md between its two marks.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MAKERS = ROOT / "scripts" / "audit_frameworks"
PAGE = ROOT / "scripts" / "docs" / "rows.md"
FRAMEWORKS = ("verl", "trl", "slime", "skyrl", "areal")
TEMPLATES = ("qwen2_5", "qwen3", "llama3_1", "gemma3")
NAMES = {"qwen2_5": "Qwen2.5", "qwen3": "Qwen3", "llama3_1": "Llama 3.1", "gemma3": "Gemma 3"}
TITLES = {"verl": "verl", "trl": "TRL", "slime": "slime", "skyrl": "SkyRL", "areal": "AReaL"}
BEGIN, END = "<!-- begin: scripts/audit_rows.py -->", "<!-- end -->"


def make(options: argparse.Namespace) -> None:
    """Run the makers."""
    pythons = dict(pair.split("=", 1) for pair in options.python)
    unknown = set(pythons) - set(FRAMEWORKS)
    if unknown:
        sys.exit(f"--python: unknown framework {', '.join(sorted(unknown))}; known: {', '.join(FRAMEWORKS)}")
    for framework, python in pythons.items():
        maker = MAKERS / f"{framework}_rows.py"
        subprocess.run([python, str(maker), options.tokenizers, options.out, *options.template], check=True)


def page(options: argparse.Namespace) -> None:
    """Audit the rows and write the table."""
    from engine.plugins.audit.audit import audit, read_rows, read_sampled
    from engine.schemas.model import ModelSpec
    from engine.tokens.loading import load_format

    out = Path(options.out)
    results: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)
    versions: dict[str, str] = {}
    for template in TEMPLATES:
        forms: dict[str, Any] = {}
        for framework in FRAMEWORKS:
            about_file = out / framework / template / "about.json"
            if not about_file.exists():
                continue
            about = json.loads(about_file.read_text(encoding="utf-8"))
            versions[framework] = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
            for told in about["failed"].values():
                results[framework, told.partition("|")[0]][template] = "does not run"
            for setting, told in about["settings"].items():
                title, name, *more = told.split("|")
                kwargs = more[0] if more else "{}"
                if kwargs not in forms:
                    spec = ModelSpec(
                        path=str(out / "models" / template), allow_special=True, template_kwargs=json.loads(kwargs)
                    )
                    forms[kwargs] = load_format(spec, ROOT)
                form = forms[kwargs]
                record = about_file.parent / f"{setting}.sampled.jsonl"
                sampled = read_sampled(record) if record.exists() else None
                report, _ = audit(read_rows(framework, [about_file.parent / name]), framework, form, sampled=sampled)
                results[framework, title][template] = _cell(report)
    text = _text(results, versions)
    whole = PAGE.read_text(encoding="utf-8")
    start, stop = whole.index(BEGIN) + len(BEGIN), whole.index(END)
    PAGE.write_text(f"{whole[:start]}\n{text}\n{whole[stop:]}", encoding="utf-8")


def _cell(report: Any) -> str:
    """A report in a few words: the rules with the number of rows, without those that only tell that something is not in the file."""
    told = []
    for rule, severities in report.counts().items():
        told += [
            f"{severity} `{rule}` {count}/{report.rows}" for severity, count in severities.items() if severity != "info"
        ]
    texts = any("only texts" in reason for reasons in report.not_judged.values() for reason in reasons)
    return "; ".join(told) or ("texts: tokens not judged" if texts else "no finding")


def _text(results: dict[tuple[str, str], dict[str, str]], versions: dict[str, str]) -> str:
    lines = [
        "| rows of | " + " | ".join(NAMES[template] for template in TEMPLATES) + " |",
        "|---|" + "---|" * len(TEMPLATES),
    ]
    for (framework, title), cells in sorted(results.items(), key=lambda item: FRAMEWORKS.index(item[0][0])):
        row = [cells.get(template, "not made") for template in TEMPLATES]
        lines.append(f"| {TITLES[framework]}: {title} | " + " | ".join(row) + " |")
    lines += [
        "",
        "Versions: " + "; ".join(versions[framework] for framework in FRAMEWORKS if framework in versions) + ".",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    making = commands.add_parser("make", help="make rows with the frameworks' own code")
    making.add_argument("--tokenizers", required=True, help="folder of tokenizers")
    making.add_argument("--out", required=True, help="folder for the rows")
    making.add_argument(
        "--python", action="append", default=[], metavar="FRAMEWORK=PYTHON", help="the Python that has it"
    )
    making.add_argument("--template", action="append", choices=TEMPLATES, help="only this template")
    making.set_defaults(run=make)
    paging = commands.add_parser("page", help="audit the rows and write the table")
    paging.add_argument("--out", required=True, help="folder of the rows")
    paging.set_defaults(run=page)
    options = parser.parse_args()
    if getattr(options, "template", None) is None:
        options.template = list(TEMPLATES)
    options.run(options)


if __name__ == "__main__":
    main()
