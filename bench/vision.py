"""What many screenshots cost a training: `python bench/vision.py [--screenshots 1000] [--episodes 24] [--images 8]`.

Three parts, each in two ways, and each way in a process of its own, so that its peak memory is its own:

- show: all screenshots are shown in rollouts of a backend that takes no pixels.
- send: the images of an episode go from the process that sampled it to another.
- train: the tensors of the images of `--episodes` episodes are made for one forward pass over each episode.

`tensors` is what the engine did before: the processor's float tensors of each image, kept up to 1 GiB, and pickled for other processes
(all images of a step at once; here those of one episode, so that the memory suffices).
`bytes` is the engine. Its tensors are compared with the processor's.
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

            family, processor = self._vision.family, self._vision.processing.processor
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
        from engine.tokens.images import EncodedImage, digest_of

        self._bank = vision.bank
        self._digests: dict[int, str] = {}
        numbers: dict[str, int] = {}

        def digest(number: int) -> str:
            if number not in self._digests:
                self._digests[number] = digest_of(read(number))
                numbers[self._digests[number]] = number
            return self._digests[number]

        self._digest = digest
        self._bank.read_from(lambda each: EncodedImage(data=read(numbers[each]), mime="image/png"))

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


def main() -> None:
    """Measure both ways and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--screenshots", type=int, default=1000)
    parser.add_argument("--episodes", type=int, default=24)
    parser.add_argument("--images", type=int, default=8, help="screenshots of an episode")
    parser.add_argument("--way", choices=["tensors", "bytes"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        child(options.way, options.folder, options)
        return
    from engine.plugins.local.tiny_vlm import build

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build(folder / "model")
        file = folder / "model" / "preprocessor_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | PIXELS))
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
