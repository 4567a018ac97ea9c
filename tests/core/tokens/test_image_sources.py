"""Images from outside: which files, formats and sizes are read, and which are refused before anything is done with them."""

from __future__ import annotations

import io
import os
import shutil
import struct
import subprocess
import threading
import zlib
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from engine.errors import ImageError, StoreError
from engine.schemas.message import ImagePart
from engine.store.images import measure
from engine.tokens import images
from engine.tokens.images import measure_pixels, open_pixels, read_reference
from engine.tokens.pixels import FORMATS

EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n(x) print\nshowpage\n%%EOF\n"


def encoded(kind: str) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 6), "red").save(buffer, kind)
    return buffer.getvalue()


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(width: int, height: int, body: bytes) -> bytes:
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def read(reference: object) -> bytes:
    return read_reference(ImagePart(image=str(reference)), "environment")


def test_regular_files_are_read_whatever_their_size_claims(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(encoded("PNG"))
    (tmp_path / "link.png").symlink_to(tmp_path / "a.png")
    assert read(tmp_path / "a.png") == read(tmp_path / "link.png") == read(f"file://{tmp_path}/a.png") == encoded("PNG")


@pytest.mark.parametrize(
    "name", ["/dev/zero", "/dev/urandom", "/dev/null", "/dev/stdin", "pipe", "socket", "folder", "linked"]
)
def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path, name: str) -> None:
    """An endless device would fill the memory; a pipe without a writer would hang the thread."""
    path = Path(name) if name.startswith("/") else tmp_path / name
    if name == "pipe":
        os.mkfifo(path)
    elif name == "folder":
        path.mkdir()
    elif name == "linked":
        path.symlink_to("/dev/zero")
    elif name == "socket":
        import socket

        socket.socket(socket.AF_UNIX).bind(str(path))
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(read(path))
        except ImageError as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(20)
    (error,) = found
    assert isinstance(error, ImageError)
    assert error.kind == "image_unreadable"
    assert "cannot be read: " in str(error)


def test_a_file_that_is_too_large_is_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "MAX_BYTES", 3 << 20)
    with (tmp_path / "large").open("wb") as file:
        file.truncate((3 << 20) + 1)
    with pytest.raises(ImageError, match="the file is larger than 3 MiB"):
        read(tmp_path / "large")
    with (tmp_path / "just").open("wb") as file:
        file.truncate(3 << 20)
    assert len(read(tmp_path / "just")) == 3 << 20
    with pytest.raises(ImageError, match="it is larger than 3 MiB"):
        read("data:image/png;base64," + b64encode(bytes((3 << 20) + 3)).decode())


@pytest.mark.parametrize("kind", FORMATS)
def test_the_formats_that_are_named_are_read(kind: str) -> None:
    data = encoded(kind)
    assert measure_pixels(data, 1 << 20, "tool") == (8, 6)
    assert open_pixels(data).size == (8, 6)
    image = measure(data)
    assert (image.width, image.height) == (8, 6)


@pytest.mark.parametrize("kind", ["TIFF", "PPM", "TGA", "PCX", "ICO", "SGI", "DDS", "EPS", "EPS as written by hand"])
def test_every_other_format_is_refused(kind: str) -> None:
    data = EPS if kind.startswith("EPS as") else encoded(kind)
    for opened in (lambda: measure_pixels(data, 1 << 20, "tool"), lambda: open_pixels(data)):
        with pytest.raises(ImageError, match="neither PNG, JPEG, WEBP, GIF nor BMP") as raised:
            opened()
        assert raised.value.kind == "image_unreadable"
    with pytest.raises(StoreError, match="neither PNG, JPEG, WEBP, GIF nor BMP"):
        measure(data)


def test_ghostscript_is_never_started(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    monkeypatch.setattr(shutil, "which", lambda name, *_: f"/usr/bin/{name}")
    monkeypatch.setattr(subprocess, "check_call", lambda *a, **_: started.append(a))
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **_: started.append(a))
    with pytest.raises(ImageError):
        open_pixels(EPS)
    assert started == []


@pytest.mark.parametrize("size", [(60_000, 60_000), (1 << 30, 1), (2**31 - 1, 2**31 - 1)])
def test_a_bomb_is_refused_by_its_head(size: tuple[int, int]) -> None:
    """Some bytes that claim gigabytes of pixels: none of them is decoded."""
    with pytest.raises(ImageError) as raised:
        measure_pixels(png(*size, zlib.compress(bytes(1 << 16))), 33_554_432, "tool")
    assert raised.value.kind == "image_too_large"


def test_a_text_chunk_that_unpacks_to_much_is_refused() -> None:
    whole = png(2, 2, zlib.compress(bytes(14)))
    bomb = chunk(b"zTXt", b"k\0\0" + zlib.compress(bytes(80 << 20)))
    with pytest.raises(ImageError) as raised:
        open_pixels(whole[:33] + bomb + whole[33:])
    assert raised.value.kind == "image_unreadable"
