"""What many screenshots cost a training: `python bench/vision.py [--screenshots 1000] [--episodes 24] [--images 8]`.

Three parts, each in two ways, and each way in a process of its own, so that its peak memory is its own:

- show: all screenshots are shown in rollouts of a backend that takes no pixels.
- send: the images of an episode go from the process that sampled it to another.
- train: the tensors of the images of `--episodes` episodes are made for one forward pass over each episode.

`tensors` is what the engine did before: the processor's float tensors of each image, kept up to 1 GiB, and pickled for other processes
(all images of a step at once; here those of one episode, so that the memory suffices).
`bytes` is the engine. Its tensors are compared with the processor's.

    python bench/vision.py --encode [--screens 12] [--window 4] [--side 448]

measures one pass over the rows of an episode that shows `--window` screens at a time: each image encoded once, beside a computation in which each
row's images are its own. It needs the extra `train`. The model is tiny, and so its tower has another part of the time than a published model's.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import pickle
import resource
import struct
import subprocess
import sys
import tempfile
import time
import zlib
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

WIDTH, HEIGHT = 1920, 1080
DRAWN = 16
"""Screenshots that are drawn; the others are the same pixels with other metadata, so other files."""
PIXELS = {"min_pixels": 3136, "max_pixels": 12_845_056}
"""Qwen2.5-VL's published limits; the tiny model's are smaller."""


def screenshot(seed: int) -> bytes:
    """A PNG of 1920 x 1080 pixels: windows, text and a photograph's noise."""
    from PIL import Image, ImageDraw

    draw = np.random.default_rng(seed)
    image = Image.new("RGB", (WIDTH, HEIGHT), "white")
    pen = ImageDraw.Draw(image)
    for _ in range(400):
        x, y = int(draw.integers(0, WIDTH)), int(draw.integers(0, HEIGHT))
        size = int(draw.integers(5, 300)), int(draw.integers(5, 60))
        pen.rectangle((x, y, x + size[0], y + size[1]), fill=tuple(draw.integers(0, 256, 3).tolist()))
        pen.text((x, y), f"some text on the screen {draw.integers(0, 10**6)}", fill="black")
    noise = Image.fromarray(draw.integers(0, 256, (45, 60, 3), np.uint8)).resize((480, 360))
    image.paste(noise, (700, 400))
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def numbered(png: bytes, number: int) -> bytes:
    """The same picture as another file: a text chunk before its last chunk."""
    body = b"tEXtnumber\0%d" % number
    chunk = struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body))
    return png[:-12] + chunk + png[-12:]


class Before:
    """The processor's tensors of each image, kept up to 1 GiB."""

    def __init__(self, vision: Any, read: Any) -> None:
        self._vision, self._read = vision, read
        self._kept: OrderedDict[int, Any] = OrderedDict()

    def tensors(self, number: int) -> Any:
        found = self._kept.get(number)
        if found is None:
            from engine.tokens.images import open_pixels

            family, processor = self._vision.family, self._vision.processor
            found = self._kept[number] = family.process(processor, open_pixels(self._read(number)))[0]
            while sum(each["pixel_values"].nbytes for each in self._kept.values()) > 1 << 30:
                self._kept.popitem(last=False)
        self._kept.move_to_end(number)
        return found

    def show(self, number: int) -> None:
        self.tensors(number)

    def send(self, numbers: list[int]) -> bytes:
        return pickle.dumps({number: self.tensors(number) for number in numbers})

    def expect(self, numbers: list[int]) -> None:
        pass


class After:
    """The engine's own images."""

    def __init__(self, vision: Any, read: Any) -> None:
        from engine.tokens.images import Source, digest_of

        self._bank = vision.bank
        self._digests: dict[int, str] = {}
        numbers: dict[str, int] = {}

        def digest(number: int) -> str:
            if number not in self._digests:
                self._digests[number] = digest_of(read(number))
                numbers[self._digests[number]] = number
            return self._digests[number]

        self._digest = digest
        self._bank.read_from(lambda each: Source(read(numbers[each]), "image/png"))

    def show(self, number: int) -> None:
        self._bank.picture(self._digest(number))

    def send(self, numbers: list[int]) -> bytes:
        return pickle.dumps(self._bank.sent([self._digest(number) for number in numbers]))

    def expect(self, numbers: list[int]) -> None:
        self._bank.expect([self._digest(number) for number in numbers])

    def tensors(self, number: int) -> Any:
        return self._bank.tensors(self._digest(number))


def measured(name: str, work: Iterator[None]) -> dict[str, Any]:
    """Seconds of a part, and the peak memory up to its end."""
    before, began = os.times(), time.perf_counter()
    for _ in work:
        pass
    after = os.times()
    workers = 0.0
    for child in Path("/proc").glob("[0-9]*/stat"):  # workers that have not ended
        try:
            fields = child.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == os.getpid():
            workers += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return {
        "part": name,
        "wall": time.perf_counter() - began,
        "cpu": sum(after[:2]) - sum(before[:2]) + workers,
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def child(way: str, folder: Path, options: argparse.Namespace) -> None:
    """Measure one way, and print its parts as JSON."""
    from engine.schemas.model import ModelSpec
    from engine.tokens.loading import load_format

    vision = load_format(ModelSpec(path=str(folder / "model")), folder).vision
    assert vision is not None
    drawn = [(folder / f"{number}.png").read_bytes() for number in range(DRAWN)]

    def read(number: int) -> bytes:
        return numbered(drawn[number % DRAWN], number)

    images: Any = {"tensors": Before, "bytes": After}[way](vision, read)
    if way == "bytes":
        assert vision.processing.sized is not None
        own, theirs = images.tensors(0), Before(vision, read).tensors(0)
        assert all(np.array_equal(own[name], theirs[name]) for name in theirs)
    else:
        images.tensors(0)
    base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    trained = range(options.screenshots, options.screenshots + options.episodes * options.images)
    episodes = [list(trained[at : at + options.images]) for at in range(0, len(trained), options.images)]
    sizes: list[int] = []

    def show() -> Iterator[None]:
        for number in range(options.screenshots):
            yield images.show(number)

    def send() -> Iterator[None]:
        for numbers in episodes:
            yield sizes.append(len(images.send(numbers)))

    def train() -> Iterator[None]:
        images.expect(list(trained))
        for numbers in episodes:
            tensors = [images.tensors(number) for number in numbers]
            yield None
            del tensors

    parts = [measured(name, part()) for name, part in (("show", show), ("send", send), ("train", train))]
    print(json.dumps({"parts": parts, "base": base, "sent": sum(sizes)}))


def encode(folder: Path, options: argparse.Namespace) -> None:
    """CPU seconds of a pass and its gradients, shared and not, in turns."""
    import torch
    from PIL import Image

    from engine.schemas.model import ModelSpec
    from engine.schemas.train import TrainSpec
    from engine.tokens.loading import load_format
    from engine.train.packing import pack_rows
    from engine.train.policy import Policy

    torch.set_num_threads(1)
    vision = load_format(ModelSpec(path=str(folder)), folder).vision
    assert vision is not None
    draw = np.random.default_rng(0)
    text = np.setdiff1d(np.arange(20, 220), vision.banned)
    screens = []
    for _ in range(options.screens):
        buffer = io.BytesIO()
        Image.fromarray(draw.integers(0, 256, (options.side, options.side, 3), np.uint8)).save(buffer, "PNG")
        screens.append((buffer.getvalue(), draw.choice(text, 16)))

    def rows(shared: bool) -> list[dict[str, Any]]:
        made = []
        for first in range(0, options.screens - options.window + 1):
            pieces, placed, start = [text[:32]], [], 32
            for number in range(first, first + options.window):
                png, reply = screens[number]
                digest = f"screen:{number}" if shared else f"screen:{number}:{first}"
                vision.bank.put(digest, png, "image/png")
                picture = vision.bank.picture(digest)
                end = start + len(picture.ids)
                placed.append({"image": digest, "start": start, "end": end, "grid": picture.grid})
                pieces += [picture.ids, reply]
                start = end + len(reply)
            ids = np.concatenate(pieces).astype(np.int32)
            trained = np.arange(len(ids)) >= len(ids) - len(reply)
            made.append({"input_ids": ids, "loss_mask": trained.astype(np.int32), "images": placed})
        return made

    policy = Policy.load(folder, TrainSpec(device="cpu"), temperature=1.0, vocab=None, vision=vision)
    encoded: list[int] = []
    spent = [0.0, 0.0]
    tower = policy.model.get_encoder("image")
    tower.register_forward_pre_hook(lambda _, args, inputs: encoded.append(len(inputs["grid_thw"])), with_kwargs=True)
    packs = [pack_rows(rows(shared), 1 << 20, share_prefixes=True)[0] for shared in (True, False)]
    gradients: list[torch.Tensor] = []
    for turn in range(6):
        began = time.process_time()
        policy.forward(packs[turn % 2], entropy=False)[0].sum().backward()
        spent[turn % 2] += (time.process_time() - began) * (turn > 1)  # the first of each is a warm-up
        gradients.append(torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None]))
        policy.model.zero_grad()
    off = float((gradients[0] - gradients[1]).norm() / gradients[1].norm())
    print(
        f"{len(packs[0].rows)} rows of {options.window} of {options.screens} screens, {packs[0].tokens} tokens in the pass"
    )
    print(f"images encoded: {encoded[0]}, each row its own: {encoded[1]}: {encoded[0] / encoded[1]:.2f}x")
    print(f"CPU time: {spent[0] / 2:.2f} s, each row its own: {spent[1] / 2:.2f} s: {spent[0] / spent[1]:.2f}x")
    print(f"gradients differ by {off:.1e} of their norm")


def main() -> None:
    """Measure both ways and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--screenshots", type=int, default=1000)
    parser.add_argument("--episodes", type=int, default=24)
    parser.add_argument("--images", type=int, default=8, help="screenshots of an episode")
    parser.add_argument("--way", choices=["tensors", "bytes"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--encode", action="store_true", help="measure a pass over rows that share screens")
    parser.add_argument("--screens", type=int, default=12)
    parser.add_argument("--window", type=int, default=4)
    parser.add_argument("--side", type=int, default=448, help="of a screen, in pixels")
    options = parser.parse_args()
    if options.way:
        child(options.way, options.folder, options)
        return
    from engine.tokens.tiny_vlm import build

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build(folder / "model")
        file = folder / "model" / "preprocessor_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | PIXELS))
        if options.encode:
            encode(folder / "model", options)
            return
        for number in range(DRAWN):
            (folder / f"{number}.png").write_bytes(screenshot(number))
        print(
            f"{options.screenshots} screenshots shown; {options.episodes} episodes of {options.images} sent and trained"
        )
        print("| | part | wall s | CPU s | peak MB so far, above the start |\n|---|---|---|---|---|")
        for way in ("tensors", "bytes"):
            command = [sys.executable, __file__, *sys.argv[1:], "--way", way, "--folder", name]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            told = json.loads(done.stdout.splitlines()[-1])
            for part in told["parts"]:
                peak = part["peak"] - told["base"]
                print(f"| {way} | {part['part']} | {part['wall']:.1f} | {part['cpu']:.1f} | {peak:.0f} |")
            print(f"| {way} | sent to each other process, MB | | | {told['sent'] / 1e6:.1f} |", flush=True)


if __name__ == "__main__":
    main()
