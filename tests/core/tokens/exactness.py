"""Scripted conversations on any chat template, judged by what `apply_chat_template` writes.

A case is a folder with `chat_template.jinja`. Where it also holds `tokenizer.json` and `tokenizer_config.json`, these are used;
else a small tokenizer is made that has the template's special tokens. `case.json` may name {"eos": token, "stops": [tokens]}.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exactness_scenarios import SCENARIOS, TOOLS, Said, Step

from engine.errors import EngineError, RenderError
from engine.schemas.generation import FinishReason, Generation, VersionSpan
from engine.schemas.message import ToolCall
from engine.schemas.model import ModelSpec
from engine.store.codec import json_of
from engine.store.results import _write_branch
from engine.tokens.bridge.guard import BranchGuard, _Job
from engine.tokens.bridge.guard_child import compare
from engine.tokens.choosing import ARGUMENTS, AWKWARD, written
from engine.tokens.conversation import Conversation
from engine.tokens.loading import load_format
from engine.tokens.tape import Tape
from engine.tokens.template import ChatTemplate
from engine.tokens.tokenizer import unquote

SHIPPED = Path(__file__).parents[2] / "data" / "templates"
SPECIAL = re.compile(
    r"<\|[^|<>\s{}'\"]+\|>|<｜[^｜]+｜>|<(?:start|end)_of_turn>|</?think>|<end_of_utterance>|<\|?turn\|?>|<\|?channel\|?>"
    r"|</s>|<s>|</?tool_call>|</?tool_response>|</?arg_(?:key|value)>|\[gMASK\]|<sop>|<bos>|<eos>|\[/?INST\]|\[/?TOOL_CALLS\]"
    r"|\]~!?b\[|\[e~\[|</?minimax:tool_call>|<\|?tool_call\|?>|<\|?tool_response\|?>|<\|?tool\|?>|◁/?think▷"
)
"""What looks like a special token in a template's source."""
ENDS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<end_of_turn>",
    "<turn|>",
    "<|end|>",
    "<|END_OF_TURN_TOKEN|>",
    "<｜end▁of▁sentence｜>",
    "</s>",
)
BESIDE = {
    "<|im_start|>": ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<tool_response>"),
    "<|eot_id|>": ("<|begin_of_text|>", "<|end_of_text|>", "<|eom_id|>", "<|python_tag|>", "<|start_header_id|>", "<|end_header_id|>"),
    "<｜User｜>": (
        "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>",
    ),
    "<|turn>": ("<bos>", "<eos>", '<|"|>', "<|tool>", "<tool|>", "<|image|>", "<|think|>", "<|image>", "<image|>", "<|video|>"),
    "<|channel|>": ("<|start|>", "<|end|>", "<|message|>", "<|return|>", "<|call|>", "<|constrain|>", "<|startoftext|>"),
    "<|observation|>": ("[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|system|>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    "<|START_OF_TURN_TOKEN|>": ("<BOS_TOKEN>",),
}  # fmt: skip
"""Special tokens that a family's tokenizer has beside those that its template names."""
BEGINS = ("<|begin_of_text|>", "<｜begin▁of▁sentence｜>", "<bos>", "<BOS_TOKEN>", "<|startoftext|>", "<s>")
OTHER_ENDS = ("<|endoftext|>", "<|eom_id|>", "<eos>", "<|user|>", "<|observation|>", "<|return|>", "<|call|>")


def cases() -> dict[str, Path]:
    """Case folders by name: those that are shipped, and those under EPISODE_ENGINE_TEMPLATES."""
    return {name: folder for root in (SHIPPED, *_named("EPISODE_ENGINE_TEMPLATES")) for name, folder in _cases_in(root)}


def all_cases(made: Path) -> dict[str, Path]:
    """`cases`, real tokenizers with their own templates (EPISODE_ENGINE_TOKENIZERS), and what the package `trl` ships.

    Args:
        made: An empty folder for the cases of `trl`.
    """
    found = {f"npm: {name}": folder for root in _named("EPISODE_ENGINE_TOKENIZERS") for name, folder in _cases_in(root)}
    spec = importlib.util.find_spec("trl")
    for root in (spec.submodule_search_locations or []) if spec is not None else []:
        for file in sorted(Path(root, "chat_templates").glob("*.jinja")):
            folder = made / file.stem
            folder.mkdir()
            shutil.copy(file, folder / "chat_template.jinja")
            found[f"trl: {file.stem}"] = folder
    return {**cases(), **found}


def _named(variable: str) -> list[Path]:
    return [Path(root) for root in os.environ.get(variable, "").split(os.pathsep) if root]


def _cases_in(root: Path) -> Iterator[tuple[str, Path]]:
    for folder in sorted(path for path in root.iterdir() if path.is_dir()) if root.is_dir() else []:
        config = folder / "tokenizer_config.json"
        own = config.is_file() and "chat_template" in json.loads(config.read_text())
        if own or (folder / "chat_template.jinja").is_file():
            yield folder.name, folder


def load_case(folder: Path, made: Path, make_tokenizer: Callable[..., Path], **model: Any) -> ChatTemplate:
    """The chat format of a case. `made`: an empty folder for the files that the case itself does not have."""
    if not (folder / "chat_template.jinja").is_file():
        return load_format(ModelSpec(path=str(folder), **model), Path())
    source = (folder / "chat_template.jinja").read_text()
    told = json.loads(file.read_text()) if (file := folder / "case.json").is_file() else {}
    if (folder / "tokenizer.json").is_file():
        path = folder
    else:
        tokens = [*SPECIAL.findall(source), *told.get("tokens", []), "<|endoftext|>", "<s>", "</s>"]
        tokens = list(
            dict.fromkeys([*tokens, *(token for mark, more in BESIDE.items() if mark in source for token in more)])
        )
        eos = told.get("eos") or next((token for token in ENDS if token in source), "<|endoftext|>")
        path = make_tokenizer(made, source, tokens, eos)
    spec = ModelSpec(path=str(path), **model)
    if path != folder:
        tokenizer = json.loads((path / "tokenizer.json").read_text())
        ids = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
        stops = told.get("stops") or [token for token in (eos, *OTHER_ENDS) if token in ids]
        config = json.loads((path / "tokenizer_config.json").read_text())
        bos = next((token for token in BEGINS if token in ids), None)
        (path / "tokenizer_config.json").write_text(json.dumps({"bos_token": bos, **config}))
        (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [ids[token] for token in stops]}))
    return load_format(spec, Path())


# --- scenarios -------------------------------------------------------------------------------------------------------


# --- the oracle ------------------------------------------------------------------------------------------------------


@dataclass
class Result:
    """What one script came to."""

    verdict: str
    """`exact`, `spaced` (exact but for white space that was sampled), `branched`, `refused` or `WRONG`."""
    why: str = ""
    needless: str = ""
    """A branch that the template does not need."""


class Wrong(AssertionError):
    """A prompt that the template does not write."""


def aligned(pieces: Sequence[tuple[bool, str]], text: str) -> int | None:
    """Where a tape's text ends in a template's: white space alone may differ, and in sampled pieces alone.

    Args:
        pieces: (sampled, text) of the tape.
        text: What the template writes.

    Returns:
        Characters of the sampled pieces that differ (0 where all is the same); None where the tape is no beginning of the text.
    """
    places = {0: 0}
    for sampled, piece in pieces:
        after: dict[int, int] = {}
        for place, spaced in places.items():
            if not sampled:
                if text.startswith(piece, place):
                    after[place + len(piece)] = spaced
                continue
            if text.startswith(piece, place):
                after[place + len(piece)] = spaced
            at = place
            for character in "".join(piece.split()):
                while at < len(text) and text[at].isspace():
                    at += 1
                if at >= len(text) or text[at] != character:
                    break
                at += 1
            else:
                while True:
                    after.setdefault(at, spaced + 1)
                    if at >= len(text) or not text[at].isspace():
                        break
                    at += 1
        places = after
    return min(places.values(), default=None)


class Player:
    """Plays one script."""

    def __init__(self, form: ChatTemplate, tools: bool) -> None:
        self.template = form
        self.tools: list[dict[str, Any]] = TOOLS if tools else []
        self.conversation = Conversation(form, self.tools)
        self.sampled: list[list[int]] = []
        self.raw: dict[int, str] = {}
        self.spaced = 0
        self.beside = False
        """A reply has thoughts that its template has no place for: a call after them may be none."""
        self.needless = ""

    def play(self, steps: Sequence[Step]) -> Result:
        try:
            for number, step in enumerate(steps):
                if isinstance(step, Said):
                    self._reply(step)
                else:
                    (self.conversation.add if number else self.conversation.open)(step)
                    self._check()
            self._check_rows()
            self._check_guard()
        except Wrong as wrong:
            return Result("WRONG", str(wrong))
        except RenderError as error:
            return Result("refused", str(error), self.needless)
        reasons = [tape.reason for tape in self.conversation.tapes[1:]]
        if reasons:
            return Result("branched", "; ".join(reasons), self.needless)
        return Result("spaced" if self.spaced else "exact")

    def _messages(self, raw: bool = False) -> list[dict[str, Any]]:
        """The conversation as it is now, in OpenAI's form. `raw`: replies as text, as they were sampled."""
        found = []
        for index, message in enumerate(self.conversation.messages):
            view = self.conversation.thread.verbatim.get(index)
            if raw and index in self.raw:
                found.append({"role": "assistant", "content": self.raw[index]})
                continue
            if view is not None:
                found.append({key: unquote(text) if isinstance(text, str) else text for key, text in view.items()})
                continue
            view = {"role": message.role, "content": message.text}
            if message.reasoning:
                view["reasoning_content"] = message.reasoning
                view[getattr(self.template.source, "reasoning_key", "reasoning_content")] = message.reasoning  # type: ignore[attr-defined]
            if message.tool_calls:
                view["tool_calls"] = [
                    {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
                    for call in message.tool_calls
                ]
            if message.role == "tool":
                view |= {"name": message.name, "tool_call_id": message.tool_call_id}
                if self.template.tool_role == "user":
                    view = {"role": "user", "content": message.text}
            found.append(view)
        return found

    def _written(self, raw: bool = False) -> str:
        messages = self._messages(raw)
        if getattr(self.template.source, "_in_parts", False):  # type: ignore[attr-defined]
            messages = [{**view, "content": [{"type": "text", "text": view["content"]}]} for view in messages]
        tokenizer = self.template.tokenizer
        variables = getattr(getattr(self.template, "_source", None), "_variables", {})
        kwargs = {name: value for name, value in variables.items() if name not in tokenizer.special_tokens_map}
        return str(
            tokenizer.apply_chat_template(
                messages, tools=self.tools or None, add_generation_prompt=True, tokenize=False, **kwargs
            )
        )

    def _pieces(self, tape: Tape) -> list[tuple[bool, str]]:
        ids = tape.ids.tolist()
        return [(span.kind == "generated", self.template.decode(ids[span.start : span.end])) for span in tape.spans]

    def _check(self) -> None:
        """The next prompt is what the template writes, or begins a branch that had to begin."""
        tapes = self.conversation.tapes
        before, old = len(tapes), tapes[-1] if tapes else None
        said = self._pieces(old) if old is not None else []
        prompt = self.conversation.prompt().tolist()
        text = self._written()
        tape = self.conversation.tapes[-1]
        spelled = any(self.template.fast.quoting.spans(message.text) for message in self.conversation.messages)
        for span in tape.spans:
            ids = prompt[span.start : span.end]
            if spelled:  # their text spells tokens, and stays text
                continue
            if span.kind != "generated" and ids != self.template.tokenizer.encode(
                self.template.decode(ids), add_special_tokens=False
            ):
                raise Wrong(f"{span.kind} has other ids than its text {self.template.decode(ids)!r}")
        found = aligned(self._pieces(tape), text)
        if found is None or sum(len(piece) for _, piece in self._pieces(tape)) > len(text) + 200:
            raise Wrong(f"{self.template.decode(prompt)!r} is not {text!r}")
        if "".join(self.template.decode(prompt).split()) != "".join(text.split()):
            raise Wrong(f"{self.template.decode(prompt)!r} ends before {text!r}")
        self.spaced += found
        if len(self.conversation.tapes) > before >= 1:
            if not tape.reason:
                raise Wrong("a branch without a reason")
            for other in (False, True)[: 2 - self.template.knows_reasoning]:
                whole = self._written(raw=other)
                if (
                    "no added token" not in tape.reason
                    and aligned(said, whole) is not None
                    and self._ends_well(said, whole)
                ):
                    self.needless = self.needless or f"{tape.reason} | {said[-1][1]!r} in {whole!r}"

    def _ends_well(self, said: list[tuple[bool, str]], text: str) -> bool:
        """Whether the template goes on after the tape with an added token, or with white space and one."""
        rest = text.rpartition(said[-1][1])[2].lstrip()
        return any(rest.startswith(token) for token in self.template.fast.added) or said[-1][1].endswith(
            tuple(self.template.stops)
        )

    def _text(self, said: Said) -> str:
        """What the model samples for it: as the template itself would write it, where it can."""
        if said.raw is not None:
            return said.raw
        form, asked = self.template, {"role": "user", "content": "Q"}
        opened = re.search(r"<think>\s*\Z", form.text([asked], None)) is not None
        view: dict[str, Any] = {"role": "assistant", "content": said.content}
        if said.calls:
            view["tool_calls"] = [
                {
                    "type": "function",
                    "id": f"call_{len(self.sampled)}_{number}",
                    "function": {"name": "probe_tool", "arguments": arguments},
                }
                for number, arguments in enumerate(said.calls)
            ]
        if said.thoughts is None and not said.calls and not opened:
            return said.content
        if said.thoughts and form.knows_reasoning:
            view["reasoning_content"] = said.thoughts
        shown = written(form, view)
        if shown is None:
            raise RenderError("the template writes no such reply")
        text = shown[1]
        prompt = form.text([asked], TOOLS)
        if prompt.startswith(shown[0]):  # the prompt itself opens the reasoning
            text = text.removeprefix(prompt[len(shown[0]) :])
        if said.thoughts is not None and said.thoughts not in text:
            text = f"<think>\n{said.thoughts}\n</think>\n\n{text}"
            self.beside = True
        if opened and "</think>" not in text:  # what is said behind no thoughts: the prompt began some
            text = f"\n</think>\n\n{text}"
        return text if said.cut is None else text[: said.cut]

    def _reply(self, said: Said) -> None:
        form = self.template
        text = self._text(said)
        ids = form.encode(text)
        end = "none" if said.cut is not None else said.end
        if end == "close":
            ids = [*ids, form.stop_token_ids[0] if form.close_id is not None else self._opener(said)]
        elif end == "other":
            others = [id_ for id_ in form.stop_token_ids if id_ != form.close_id and id_ != self._opener(said)]
            if not others:
                raise RenderError("the tokenizer has one token that ends replies")
            ids = [*ids, others[0]]
        turn = len(self.sampled)
        self.sampled.append(ids)
        finish = FinishReason(type="length" if end == "none" else "stop")
        generation = Generation.read({"output_ids": ids, "logprobs": [-0.5] * len(ids), "finish": finish, "versions": [VersionSpan(version=0, start=0, end=len(ids))] if ids else []})  # fmt: skip
        self.raw[len(self.conversation.messages)] = text
        reply = self.conversation.reply(generation, turn)
        if said.calls and said.raw is None and not (self.beside and not reply.attempts):
            if end != "close" and any(not isinstance(a, ToolCall) for a in reply.attempts):
                return  # the end that is missing is part of the call
            read = [(a.name, a.arguments) if isinstance(a, ToolCall) else a.problem for a in reply.attempts]
            wanted = [("probe_tool", arguments) for arguments in said.calls]
            if json.dumps(read, sort_keys=True) != json.dumps(wanted, sort_keys=True):
                malformed = any(not isinstance(attempt, ToolCall) for attempt in reply.attempts)
                if malformed and said.calls in [ARGUMENTS[name] for name in AWKWARD]:
                    raise RenderError(f"{text!r} is text that nobody can read back: it is read as {read}")
                raise Wrong(f"the calls {wanted}, written {text!r}, are read as {read}")

    def _opener(self, said: Said) -> int:
        """The token that the model ends this reply with."""
        form = self.template
        view: dict[str, Any] = {"role": "assistant", "content": "A"}
        new: list[dict[str, Any]] = [{"role": "user", "content": "Q"}]
        if said.calls:
            call = {
                "type": "function",
                "id": "call_0_0",
                "function": {"name": "probe_tool", "arguments": {"text": "x"}},
            }
            view["tool_calls"], new = (
                [call],
                [{"role": "tool", "content": "R", "name": "probe_tool", "tool_call_id": "call_0_0"}],
            )
        try:
            found = form.unchecked_bridge(view, new, None)
        except RenderError:
            found = None
        return [*found.closing, *found.bridge][0] if found is not None else form.stop_token_ids[0]

    def _check_rows(self) -> None:
        """Each sampled token is trained once, and nothing else is."""
        trained: dict[int, list[int]] = {}
        for branch in self.conversation.branches():
            for position, mask in enumerate(branch.loss_mask.tolist()):
                turn = int(branch.turn_ids[position])
                if (mask == 1) != (turn >= 0):
                    raise Wrong(f"mask {mask} on turn {turn}")
                if mask:
                    trained.setdefault(turn, []).append(int(branch.input_ids[position]))
        wanted = {turn: ids for turn, ids in enumerate(self.sampled) if ids}
        if trained != wanted:
            raise Wrong(f"trained {trained}, sampled {wanted}")

    def _check_guard(self) -> None:
        """The guard finds nothing wrong with what is right."""
        if not self.conversation.asked:
            return
        rows = [_write_branch(branch, "e/0") for branch in self.conversation.branches()]
        told = BranchGuard(self.template, ModelSpec(path=self.template.fast.name_or_path), Path())._told
        stored = json_of({"messages": self.conversation.messages})
        job = _Job(told, self.conversation, stored, [(row[3], row[4]) for row in rows])
        asked = json.loads(b'{"form":' + told + b',"episodes":[' + job.line() + b"]}")
        if compare(None, asked) != [{}]:
            raise Wrong(f"the guard refuses it: {compare(None, asked)}")


def play(form: ChatTemplate, name: str) -> list[Result]:
    """The results of one scenario's scripts."""
    tools, scripts = SCENARIOS[name]
    results = []
    for steps in scripts:
        try:
            results.append(Player(form, tools).play(steps))
        except EngineError as error:
            results.append(Result("refused", str(error)))
    return results


SIGNS = {"exact": "=", "spaced": "~", "branched": "/", "refused": "·", "WRONG": "WRONG"}
"""One sign for a verdict."""


def signs(results: Sequence[Result]) -> str:
    """The verdicts of a scenario's scripts: each once, the most exact first."""
    return " ".join(sign for verdict, sign in SIGNS.items() if any(result.verdict == verdict for result in results))
