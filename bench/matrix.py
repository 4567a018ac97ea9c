"""Write docs/exactness.md: every scenario on every chat template at hand, judged by `apply_chat_template`.

    EPISODE_ENGINE_TOKENIZERS=FOLDER python bench/matrix.py            # writes docs/exactness.md
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

HEAD = """\
# What is exact, and where a branch begins

The prompt of every turn is what the model's chat template renders for the conversation as it is, or a new branch begins, or
the conversation is refused with a reason. This page is that sentence, tried: `bench/matrix.py` plays every scenario of
`tests/core/tokens/exactness.py` on every template at hand, and compares each prompt with what `apply_chat_template` of
transformers writes. It also checks that every sampled token is trained once, and that nothing else is.

| sign | what it means |
|---|---|
| = | exact: the text is the template's, id for id what its text is tokenised to; sampled ids are as they were sampled |
| ~ | exact but for white space inside of what was sampled, which stays as it was sampled: the template would trim or space it |
| / | a branch began where the template rewrites what was said; the branch is exact |
| · | refused with a reason: the template shows no such message, or nothing reads its calls |
| WRONG | a prompt that the template does not write: a bug |

`reader` is what reads the replies, proved on the template itself; `engine template MODEL` shows the proof. Templates without their own
tokenizer are played on a small byte-level one that has their special tokens. To try yours: a folder with
`chat_template.jinja` (and `tokenizer.json`, `tokenizer_config.json`) under a folder that `EPISODE_ENGINE_TEMPLATES` names, then
`pytest tests/core/tokens/test_exactness.py`.

## How a prompt is made

`prompts` in the table says how the prompts after the first are made. `engine template MODEL` says the same, and why:

| `prompts` | the template's source | the next prompt |
|---|---|---|
| copied | copies contents, trimmed at most, and tests no more than roles, order, reasoning, calls and whether a text is empty | the tape and a bridge that was checked once for messages of these kinds |
| keyed | also looks for literals in contents: `'/think' in message.content`, `endswith`, `split`, `replace`, … | the same while no message has one of them; from the message on that has one, as *rendered* |
| rendered | counts, measures, cuts, keeps states over messages, shows the time, or does what is not understood | the whole conversation is rendered; what it writes after the tape's text continues the tape, or a branch begins |
| library | there is none: `model.renderer` names a family of `renderers` | as *copied* |

The source is read once, when the format is loaded (10 to 35 ms of CPU time). The reading is conservative:
what it does not understand is *rendered*. A template that shows the date is rendered whole in conversations that go on after midnight.

Text that spells special tokens stays text for the tokenizer, and is what it is for the template: its tests, lengths and cuts are worked out on
the text itself. So GLM-4.5, which adds `/nothink` to a message unless it ends in it, writes it once. Where a template does something
to such a text that cannot be followed, the conversation is refused. A reply of the model in which ordinary tokens spell a marker, such as `</think>`,
is no marker for the template.

`tests/core/tokens/hostile_templates.py` has 14 hostile templates and a grammar of others, played in random episodes on two tokenizers.

## The guard

A row is handed over only after its guard has answered: a process of its own renders the conversation of every ended branch, and compares it
with the row. It does not use the checks that allow bridges, so an error in them cannot hide itself. For each branch it takes the messages
that the model was shown before the branch's last reply, as they are, and the tools; it renders them with the generation prompt as
`apply_chat_template` does, at the time at which the prompt was made, and compares the text with the decoded ids up to that reply. Only in the
model's own replies is text that spells a token without being one hidden from the template's tests, as it is where prompts are made.

- White space inside of sampled text may differ. Nothing else may: not a character of the prompt, of messages, of what stands between turns.
- What was not sampled is encoded again, and must give the ids of the row. Sampled ids are not canonical, so they are not encoded.
- Prompts of the branch's earlier replies are beginnings of what is compared. They are wrong unnoticed only if the template writes something
  for them that it does not write for the longer conversation.

| failure (`outcome.failure.kind`, blame `engine`) | what it means | what follows |
|---|---|---|
| `bridge_differs` | a bridge of the row is not what the template writes; the message names branch, token and message | every later prompt of this chat format is rendered whole, in this process, in its drivers and after a resume; `engine run --resume RUN --retry-failed all` repeats the episode |
| `prompt_differs` | the row differs although its prompt was rendered whole, or because a text that only spells a special token is hidden from a template that looks for it | the message says which; with `model.allow_special: true` nothing is hidden |
| `unguarded` | the guard gave no answer three times: its process died, ran out of memory, or took longer than 60 s and 1 s for each 10,000 tokens | the rows are stored and not trainable |

The rows of such an episode are stored with `trainable: false`, and the failure is shown wherever failures are. A failure that makes them
untrainable already is kept. `bridge_differs` does not count towards the first episodes that all fail with one cause, because its cause is gone.

Not guarded: rows without exact ids (`openai`, `anthropic`), which are never trainable; episodes with `history: keep`, whose rows are what was
sampled, whatever the template would write; and rows of other frameworks, which [audits](rows.md#auditing-rows-of-other-frameworks) check. Replays and `rescore` keep the
stored verdict. Families of the library `renderers` (`model.renderer`) have no template; their guard renders with that library.

## Templates
"""


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
        (ROOT / "docs" / "exactness.md").write_text(_page(rows, counts), encoding="utf-8")
    print(dict(counts))
    return int(counts["WRONG"] > 0)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")[:120]


def _page(rows: list[str], counts: Counter[str]) -> str:
    total = ", ".join(f"{counts[verdict]} {verdict}" for verdict in SIGNS)
    head = f"| template | reader | prompts | {' | '.join(SCENARIOS)} |\n|---|---|---|{'---|' * len(SCENARIOS)}\n"
    return (
        f"{HEAD}\n{len(rows)} templates, {sum(counts.values())} episodes: {total}.\n\n{head}" + "\n".join(rows) + "\n"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
