"""Write the table of docs/exactness.md: every scenario on every chat template at hand, judged by `apply_chat_template`.

    EPISODE_ENGINE_TOKENIZERS=FOLDER python bench/matrix.py            # writes the table
    python bench/matrix.py NAME…                                       # prints why, for cases of these names

Templates come from `tests/data/templates`, the folders of EPISODE_ENGINE_TEMPLATES, the package `trl`, and the real tokenizers that
`scripts/fetch_tokenizers.sh FOLDER` fetches. It takes two to three minutes.
"""

from __future__ import annotations

import logging
import sys
import tempfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "kit"), str(ROOT / "tests" / "core" / "tokens")]

import structlog  # noqa: E402
from chat_kit import make_tokenizer  # noqa: E402
from exactness import SIGNS, all_cases, load_case, play, signs  # noqa: E402
from exactness_scenarios import SCENARIOS  # noqa: E402

from engine.errors import RenderError  # noqa: E402
from engine.plugins.templates.report import how_prompts_are_made  # noqa: E402

PAGE = ROOT / "docs" / "exactness.md"
BEGIN, END = "<!-- bench/matrix.py: begin -->\n", "<!-- bench/matrix.py: end -->"


def main(names: list[str]) -> int:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    counts: Counter[str] = Counter()
    rows: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "trl"
        made.mkdir()
        for number, (name, case) in enumerate(all_cases(made).items()):
            if names and name not in names:
                continue
            try:
                form = load_case(case, Path(folder) / str(number), make_tokenizer)
            except RenderError as error:
                rows.append(f"| {name} | refused: {_cell(str(error))} | refused |" + " · |" * len(SCENARIOS))
                counts["refused"] += 1
                continue
            cells = []
            for scenario in SCENARIOS:
                results = play(form, scenario)
                counts.update(result.verdict for result in results)
                cells.append(signs(results))
                for result in results if names else []:
                    print(f"{scenario}: {result.verdict}: {result.why}")
            reader = form.reader.name if form.reader is not None else "none" if form.unread_calls else "text"
            rows.append(f"| {name} | {reader} | {how_prompts_are_made(form)[0]} | " + " | ".join(cells) + " |")
            print(name, flush=True)
    if not names:
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        PAGE.write_text(before + BEGIN + _table(rows, counts) + END + rest.partition(END)[2], encoding="utf-8")
    print(dict(counts))
    return int(counts["WRONG"] > 0)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")[:120]


def _table(rows: list[str], counts: Counter[str]) -> str:
    total = ", ".join(f"{counts[verdict]} {verdict}" for verdict in SIGNS)
    names: dict[str, list[str]] = {}  # by the rest of a row: templates that come to the same share a line
    for row in rows:
        _, name, rest = row.split("|", 2)
        names.setdefault(rest, []).append(name.strip())
    head = f"| templates | reader | prompts | {' | '.join(SCENARIOS)} |\n|---|---|---|{'---|' * len(SCENARIOS)}\n"
    return f"{len(rows)} templates, {sum(counts.values())} episodes: {total}.\n\n{head}" + "".join(
        f"| {', '.join(members)} |{rest}\n" for rest, members in names.items()
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
