"""A real tokenizer, made on the spot, and chat templates that stand for the ways in which real ones behave."""

from __future__ import annotations

from pathlib import Path

THINKING = """\
{%- if tools %}{{ '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif %}
{{- '# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\nYou are provided with function signatures within <tools></tools> XML tags:\\n<tools>' }}
{%- for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{% endfor %}
{{- '\\n</tools>\\n\\nFor each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:\\n<tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}{{ '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{% endif %}
{%- set ns = namespace(query=messages|length - 1, found=false) %}
{%- for m in messages[::-1] %}
{%- if not ns.found and m.role == 'user' and not (m.content.startswith('<tool_response>') and m.content.endswith('</tool_response>')) %}
{%- set ns.found = true %}{% set ns.query = messages|length - loop.index %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- elif m.role == 'assistant' %}
{%- set content = m.content %}{% set why = '' %}
{%- if m.reasoning_content is string %}{% set why = m.reasoning_content %}
{%- elif '</think>' in content %}
{%- set why = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}{% set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}
{%- if loop.index0 > ns.query and (loop.last or why) %}{{ '<|im_start|>assistant\\n<think>\\n' + why.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
{%- else %}{{ '<|im_start|>assistant\\n' + content }}{% endif %}
{%- for call in m.tool_calls or [] %}
{%- if not loop.first or content %}{{ '\\n' }}{% endif %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}{{ call.function.arguments | tojson }}{{ '}\\n</tool_call>' }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}"""
"""Drops the reasoning of replies before the newest query, as Qwen3's does, byte for byte."""

PLAIN = """\
{%- if messages[0].role != 'system' %}{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}{% endif %}
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""ChatML as SmolLM2 has it: a default system message, roles verbatim, no tools."""

ALTERNATING = """\
{{ '<s>' }}{%- for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}
{{- '<|im_start|>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + m.content | trim + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>model\\n' }}{% endif %}"""
"""Trims contents and refuses all but user and assistant in turn, as Gemma's does."""

UNMARKED = """\
{%- for m in messages %}{{ '### ' + m.role + ':\\n' + m.content + '\\n\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '### assistant:\\n' }}{% endif %}"""
"""Ends replies with no token of its own: a merge may cross every boundary."""

COUNTING = """\
{{ '<|im_start|>system\\n' + messages|length|string + ' messages<|im_end|>\\n' }}
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""Looks at the whole conversation: whatever is said next changes what was said first."""

DROPPING = """\
{%- for m in messages %}{% if m.role in ('user', 'assistant') %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""Leaves out system and tool messages without a word."""

PREFILLED = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' %}{{ '<think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n\\n' }}{% endif %}
{{- m.content + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"""
"""Opens the reasoning in the generation prompt, and keeps it."""

TEMPLATES = {
    "thinking": THINKING,
    "plain": PLAIN,
    "alternating": ALTERNATING,
    "unmarked": UNMARKED,
    "counting": COUNTING,
    "dropping": DROPPING,
    "prefilled": PREFILLED,
}

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>"]
MARKERS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]

CORPUS = [
    "What is 17 plus 25? The answer is 42. You are a helpful assistant. First 12 things.",
    '<tool_call>\n{"name": "calculate", "arguments": {"expression": "3 * (4 + 5)"}}\n</tool_call>',
    "That is not right. Try again, and give only the number in tags.\n\nuser assistant system tool\n",
    "def add(a: int, b: int) -> int:\n    return a + b\n",
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May.",
]

PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Qwen's tokenizers cut text before they merge."""


def make_tokenizer(folder: Path, template: str, extra: list[str] | None = None, eos: str = "<|im_end|>") -> Path:
    """A byte-level BPE tokenizer in the manner of Qwen's, with a chat template, saved in `folder`."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    core.train_from_iterator(CORPUS * 4, trainer)
    specials = list(dict.fromkeys([*SPECIALS, *(extra or []), eos]))
    core.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in specials])
    core.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKERS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=eos, pad_token="<|endoftext|>", chat_template=template or None
    )
    fast.save_pretrained(folder)
    return folder
