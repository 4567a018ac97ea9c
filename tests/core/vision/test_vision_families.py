"""Each family's images: what the tape holds is what the model's own processor writes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from vision_code import FIRST, SECOND, THIRD, pil
from vision_kit import BUILDERS, square

from engine.errors import ImageError, RenderError
from engine.schemas.generation import FinishReason, Generation
from engine.schemas.message import ImagePart, Message, TextPart
from engine.schemas.model import ModelSpec
from engine.tokens.conversation import Conversation
from engine.tokens.images import digest_of
from engine.tokens.loading import load_format
from engine.tokens.tape import Tape
from engine.tokens.template import ChatTemplate
from engine.tokens.vision import Vision

FAMILIES = pytest.mark.parametrize("family", BUILDERS)


def form_of(folder: Path, **model: object) -> ChatTemplate:
    return load_format(ModelSpec(path=str(folder), **model), folder)  # type: ignore[arg-type]


def seen(vision: Vision, data: bytes) -> ImagePart:
    vision.bank.put(digest_of(data), data, "image/png")
    return ImagePart(image=digest_of(data))


def reply(form: ChatTemplate, text: str) -> Generation:
    ids = np.array([*form.encode(text), form.stop_token_ids[0]], np.int32)
    return Generation.read(
        {
            "output_ids": ids,
            "logprobs": np.zeros(len(ids), np.float32),
            "finish": FinishReason(type="stop"),
            "prompt_tokens": 0,
        }
    )


def by_the_processor(form: ChatTemplate, messages: list[dict[str, object]], images: list[bytes]) -> list[int]:
    """The processor's own ids of a conversation: template, expansion and tokens in one go."""
    assert form.vision is not None
    text = form.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    found = form.vision.processing.processor(images=[[pil(data) for data in images]], text=[text])
    ids: list[int] = found["input_ids"][0]
    return ids


@FAMILIES
def test_a_conversation_has_the_processors_own_ids_turn_after_turn(family: str, vlm: Callable[[str], Path]) -> None:
    form = form_of(vlm(family))
    vision = form.vision
    assert vision is not None
    lead = (
        " " if family in ("smolvlm", "idefics3") else ""
    )  # its generation prompt is `Assistant:`, its replies are `Assistant: …`
    text, image = (lambda words: {"type": "text", "text": words}), {"type": "image"}
    conversation = Conversation(form, [])
    said: list[dict[str, object]] = [{"role": "user", "content": [image, text("What colour?")]}]
    conversation.open([Message(role="user", content=[seen(vision, FIRST), TextPart(text="What colour?")])])
    assert conversation.prompt().tolist() == by_the_processor(form, said, [FIRST])
    conversation.reply(reply(form, f"{lead}It is red."), 0)
    conversation.add([Message(role="user", content=[TextPart(text="And"), seen(vision, SECOND), seen(vision, THIRD)])])
    said += [
        {"role": "assistant", "content": [text("It is red.")]},
        {"role": "user", "content": [text("And"), image, image]},
    ]
    assert conversation.prompt().tolist() == by_the_processor(form, said, [FIRST, SECOND, THIRD])
    conversation.reply(reply(form, f"{lead}It is blue."), 1)
    conversation.add([Message(role="user", content="Why?")])
    said += [{"role": "assistant", "content": [text("It is blue.")]}, {"role": "user", "content": [text("Why?")]}]
    assert conversation.prompt().tolist() == by_the_processor(form, said, [FIRST, SECOND, THIRD])
    (branch,) = conversation.branches()
    assert [image.image for image in branch.images] == [digest_of(data) for data in (FIRST, SECOND, THIRD)]
    assert (vision.bank.looked, vision.bank.processed) == (3, 0)


@pytest.mark.parametrize("renderer", ["auto", "template"])
def test_qwen3_vl_is_rendered_by_its_family_and_by_its_template_alike(
    vlm: Callable[[str], Path], renderer: str
) -> None:
    form = form_of(vlm("qwen3_vl"), renderer=renderer)
    assert form.name == "template"
    assert form.vision is not None
    call = {"name": "look", "arguments": {"where": "left"}}
    conversation = Conversation(form, [])
    conversation.open([Message(role="user", content=[seen(form.vision, FIRST)])])
    conversation.prompt()
    said = f'<tool_call>\n{{"name": "{call["name"]}", "arguments": {{"where": "left"}}}}\n</tool_call>'
    conversation.reply(reply(form, said), 0)
    assert [(call.name, call.arguments) for call in conversation.messages[-1].tool_calls] == [
        ("look", {"where": "left"})
    ]
    conversation.add([Message(role="tool", content=[TextPart(text="left:"), seen(form.vision, SECOND)], name="look")])
    pads = "<|vision_start|>" + "<|image_pad|>" * 4 + "<|vision_end|>"
    more = "<|vision_start|>" + "<|image_pad|>" * 6 + "<|vision_end|>"
    assert form.decode(conversation.prompt()) == (
        f"<|im_start|>user\n{pads}<|im_end|>\n<|im_start|>assistant\n{said}<|im_end|>\n"
        f"<|im_start|>user\n<tool_response>\nleft:{more}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert len(conversation.branches()) == 1


@FAMILIES
def test_the_expansion_is_what_the_grid_says(family: str, vlm: Callable[[str], Path]) -> None:
    vision = form_of(vlm(family)).vision
    assert vision is not None
    found = []
    for data in (FIRST, SECOND, THIRD):
        picture = vision.bank.picture(seen(vision, data).image)
        assert picture.placeholders == int((picture.ids == vision.placeholder_id).sum())
        found.append((picture.grid, picture.placeholders, len(picture.ids)))
    assert (
        found
        == {
            "qwen2_vl": [((1, 4, 4), 4, 4), ((1, 4, 6), 6, 6), ((1, 10, 4), 10, 10)],
            "qwen2_5_vl": [((1, 4, 4), 4, 4), ((1, 4, 6), 6, 6), ((1, 10, 4), 10, 10)],
            "qwen3_vl": [((1, 4, 4), 4, 4), ((1, 4, 6), 6, 6), ((1, 8, 4), 8, 8)],
            "smolvlm": [((2, 2), 20, 34), ((2, 2), 20, 34), ((2, 1), 12, 22)],
            "idefics3": [((2, 2), 20, 34), ((2, 2), 20, 34), ((2, 1), 12, 22)],
        }[family]
    )


@FAMILIES
def test_compacting_undoes_expanding(family: str, vlm: Callable[[str], Path]) -> None:
    form = form_of(vlm(family))
    vision = form.vision
    assert vision is not None
    digests = [seen(vision, data).image for data in (FIRST, SECOND, THIRD)]
    plain = [id_ for id_ in range(form.vocab_size) if id_ not in vision.banned]

    @settings(max_examples=examples(60), deadline=None)
    @given(st.lists(st.one_of(st.sampled_from(plain), st.sampled_from(digests)), max_size=12))
    def holds(items: list[int | str]) -> None:
        ids = [vision.marker_id if isinstance(item, str) else item for item in items]
        expanded, placed = vision.expand(ids, [item for item in items if isinstance(item, str)])
        if items:
            Tape(form.vocab_size, vision.placeholder_id).append("prompt", expanded, placed)
        spans = [(start, start + len(picture.ids)) for picture, start in placed]
        assert vision.compact(expanded, spans).tolist() == ids
        assert [picture.digest for picture, _ in placed] == [item for item in items if isinstance(item, str)]

    holds()


def test_markers_and_images_must_be_as_many(vlm: Callable[[str], Path]) -> None:
    vision = form_of(vlm("qwen3_vl")).vision
    assert vision is not None
    digest = seen(vision, FIRST).image
    with pytest.raises(ImageError, match="2 images were shown, and the chat template wrote 1 markers") as raised:
        vision.expand([1, vision.marker_id], [digest, digest])
    assert (raised.value.kind, raised.value.blame) == ("image_mismatch", "spec")
    expanded, placed = vision.expand([1, vision.marker_id, 2], [digest])
    tape = Tape(None, vision.placeholder_id)
    with pytest.raises(ValueError, match="5 placeholders where 1 images have 4"):
        tape.append("prompt", np.append(expanded, vision.placeholder_id), placed)
    with pytest.raises(ValueError, match="the tokens at 1 are not those of"):
        tape.append("prompt", np.roll(expanded, 1), placed)


def test_a_model_without_eyes_refuses_images(tiny_tokenizer_dir: Path) -> None:
    form = form_of(tiny_tokenizer_dir)
    assert form.vision is None
    with pytest.raises(RenderError, match="shows no images; use a vision-language model"):
        Conversation(form, []).open([Message(role="user", content=[ImagePart(image="a.png")])])


def test_a_model_whose_images_are_not_known_here_says_which_are(vlm: Callable[[str], Path], tmp_path: Path) -> None:
    for file in vlm("qwen3_vl").glob("*token*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "chat_template.jinja").write_bytes((vlm("qwen3_vl") / "chat_template.jinja").read_bytes())
    (tmp_path / "config.json").write_text('{"model_type": "gemma3", "vision_config": {"depth": 1}}')
    form = form_of(tmp_path)
    with pytest.raises(RenderError, match="images of `gemma3` models are not supported: take one of qwen2_vl, "):
        Conversation(form, []).open([Message(role="user", content=[ImagePart(image="a.png")])])


def test_an_image_that_two_episodes_want_at_once_is_processed_once(vlm: Callable[[str], Path]) -> None:
    from concurrent.futures import ThreadPoolExecutor

    vision = form_of(vlm("qwen2_5_vl")).vision
    assert vision is not None
    digest = seen(vision, square("purple", 300, 300)).image
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(vision.bank.picture, [digest] * 16))
        tensors = list(pool.map(vision.bank.tensors, [digest] * 16))
    assert {picture.digest for picture in found} == {digest}
    assert all(np.array_equal(each["pixel_values"], tensors[0]["pixel_values"]) for each in tensors)
    assert (vision.bank.looked, vision.bank.processed) == (1, 1)


def test_forgotten_tensors_are_made_again_the_same(vlm: Callable[[str], Path]) -> None:
    vision = form_of(vlm("qwen2_5_vl")).vision
    assert vision is not None
    first, second = (seen(vision, data).image for data in (FIRST, SECOND))
    before = vision.bank.tensors(first)["pixel_values"].copy()
    vision.bank._prepared._most = 1
    vision.bank.tensors(second)
    np.testing.assert_array_equal(vision.bank.tensors(first)["pixel_values"], before)
    assert vision.bank.processed == 3
