"""A real browser on a real `engine view`: Chromium, driven by playwright."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlencode

import pytest

T = TypeVar("T")
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SCREENSHOTS = os.environ.get("EPISODE_ENGINE_SCREENSHOTS")
"""A folder: each question's answer is written there as a picture for the documentation."""


ENGINE = [sys.executable, "-m", "engine.cli.main"]


def environment() -> dict[str, str]:
    """The variables of a process that runs `ENGINE` in any folder."""
    root = str(Path(__file__).parents[3])
    return dict(os.environ) | {"PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}


_ASIDE = ThreadPoolExecutor(1)


def aside(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function in a thread of its own: playwright has an event loop in this one."""
    return _ASIDE.submit(function, *arguments).result()


@contextmanager
def chromium() -> Iterator[Any]:
    """A headless Chromium of the system; the test is skipped if there is none."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
    found = next((path for path in map(shutil.which, NAMES) if path), None)
    if found is None:
        pytest.skip("there is no Chromium: apt install chromium")
    with sync_api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def served(*arguments: str | Path, cwd: Path) -> Iterator[str]:
    """`engine view ARGUMENTS` in a process of its own; gives the address that it prints."""
    command = [*ENGINE, "view", *map(str, arguments)]
    process = subprocess.Popen(command, cwd=cwd, env=environment(), stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        assert address.startswith("http://127.0.0.1:"), address
        yield address
    finally:
        process.terminate()
        process.wait(30)


class Visitor:
    """A person at the pages, whose clicks and keys are counted.

    Args:
        browser: From `chromium`.
        address: Where the pages are: of the app, or of a file.
        script: Runs in the page before its own scripts.
        context: Options of playwright's context, such as `color_scheme`.
    """

    def __init__(self, browser: Any, address: str, script: str = "", **context: Any) -> None:
        self.page = browser.new_context(**{"viewport": {"width": 1360, "height": 850}} | context).new_page()
        self.page.set_default_timeout(30_000)
        if script:
            self.page.add_init_script(script)
        self.actions = 0
        self.problems: list[str] = []
        self.requests: list[str] = []
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("console", lambda told: self.problems.append(told.text) if told.type == "error" else None)
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(address)
        self.settle()

    def settle(self) -> None:
        """Wait until the page of the address is shown."""
        self.page.wait_for_function(
            "() => document.querySelector('main')?.dataset.shown === location.hash && document.querySelector('main h1')"
        )

    def open(self, page: str, **parameters: object) -> None:
        """Go to a page by its address, as a permalink does."""
        self.page.evaluate("hash => { location.hash = hash; }", f"#/{page}?{urlencode(parameters)}")
        self.settle()

    def click(self, selector: str, **has: Any) -> None:
        """One click."""
        self.actions += 1
        self.page.locator(selector, **has).first.click()

    def press(self, key: str) -> None:
        """One key."""
        self.actions += 1
        self.page.keyboard.press(key)

    def text(self, selector: str = "main") -> str:
        """The visible text of an element, once it is there."""
        found = self.page.locator(selector).first
        found.wait_for()
        return str(found.inner_text())

    def sees(self, selector: str, *wanted: str | int) -> None:
        """Wait until so many elements are there, or until they are as many as these texts and have them, in order.

        Raises:
            AssertionError: They are not; it says what is there.
        """
        from playwright.sync_api import expect

        elements = self.page.locator(selector)
        if isinstance(wanted[0], int):
            expect(elements).to_have_count(wanted[0], timeout=30_000)
        else:
            expect(elements).to_have_text(list(wanted), timeout=30_000, use_inner_text=True)

    def keep(self, name: str) -> None:
        """Write a picture for the documentation, if one is wanted."""
        if SCREENSHOTS:
            from PIL import Image

            self.page.mouse.move(0, 0)
            Path(SCREENSHOTS).mkdir(parents=True, exist_ok=True)
            shot = Image.open(io.BytesIO(self.page.screenshot()))
            shot.save(Path(SCREENSHOTS) / f"{name}.webp", quality=82, method=6)
