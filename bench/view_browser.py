"""Seconds to the first page, a filter and an episode of `engine view` in Chromium, over 10,000 stored episodes.

    python bench/view.py --model ../tokenizers/qwen3 --episodes 10000       makes the store
    python bench/view_browser.py [--folder /tmp/engine-view-bench/10000]

A figure is the time from the start of a navigation, a click or a key until the answer is on the page. `cold` is the first start.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from playwright.sync_api import sync_playwright

from engine.store.find import list_runs


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/engine-view-bench/10000"))
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    run = list_runs(args.folder)[0]
    cache = args.folder / "browser-cache"
    shutil.rmtree(cache, ignore_errors=True)
    environment = dict(os.environ) | {"EPISODE_ENGINE_CACHE": str(cache)}
    for name in ("cold", "warm"):
        began = time.perf_counter()
        command = [sys.executable, "-m", "engine.cli.main", "view", str(run)]
        app = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        try:
            assert app.stdout is not None
            address = app.stdout.readline().strip()
            print(f"{name}: the command accepts requests{'':17} {time.perf_counter() - began:7.2f} s")
            measure(name, address, args.repeats if name == "warm" else 1)
        finally:
            app.terminate()
            app.wait()


def measure(name: str, address: str, repeats: int) -> None:
    """Measure one start of the app."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_context().new_page()
        page.set_default_timeout(120_000)

        def timed(what: str, work: Callable[[int], None]) -> None:
            took = []
            for number in range(repeats):
                began = time.perf_counter()
                work(number)
                took.append(time.perf_counter() - began)
            print(f"{name}: {what:45} {statistics.median(took):7.2f} s")

        rows = page.locator("table.episodes tbody tr")

        def first(_: int) -> None:
            page.goto(address)
            rows.nth(99).wait_for()

        def shown() -> None:
            page.wait_for_function("() => document.querySelector('main').dataset.shown === location.hash")

        def filtered(number: int) -> None:
            page.fill(
                "input[name=filter]", f"outcome.reward < 0.5 && turns.assistant > 3 && int(task.answer) > {20 + number}"
            )
            page.keyboard.press("Enter")
            page.wait_for_function("n => location.hash.includes(n)", arg=f"%3E+{20 + number}")
            shown()

        def sorted_(number: int) -> None:
            page.click('thead a:has-text("reward")')
            page.wait_for_function("() => location.hash.includes('sort=reward')")
            shown()

        def opened(number: int) -> None:
            page.locator(".row-link").nth(number).click()
            page.locator("#turn-7").wait_for()

        def tokens(_: int) -> None:
            page.keyboard.press("2")
            page.locator(".tokens .token").first.wait_for()

        def onward(_: int) -> None:
            before = page.locator("h1").inner_text()
            page.keyboard.press("n")
            page.wait_for_function("name => document.querySelector('h1').innerText !== name", arg=before)
            shown()
            page.locator("#turn-7").wait_for()

        timed("the first page, with the first 100 episodes", first)
        timed("a filter in CEL over all episodes", filtered)
        timed("sorted by reward", sorted_)
        page.goto(address)
        rows.nth(99).wait_for()
        opened_: list[float] = []
        for number in range(repeats):
            began = time.perf_counter()
            opened(number)
            opened_.append(time.perf_counter() - began)
            page.keyboard.press("u")
            rows.nth(99).wait_for()
        print(f"{name}: {'an episode of 8 turns':45} {statistics.median(opened_):7.2f} s")
        opened(0)
        began = time.perf_counter()
        tokens(0)
        print(f"{name}: {'its tokens (loads the tokenizer)':45} {time.perf_counter() - began:7.2f} s")
        timed("the next episode, with its tokens", onward)
        browser.close()


if __name__ == "__main__":
    main()
