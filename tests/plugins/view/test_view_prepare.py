"""What is read before the first filter and the first tokens."""

from __future__ import annotations

from pathlib import Path
from threading import Thread

import pytest
from listing_kit import fill, new_run

from engine.plugins.show.listing.listing import Listing
from engine.plugins.view import documents as module
from engine.plugins.view.documents import Documents


@pytest.mark.parametrize("first", ["page", "episode"])
async def test_the_tokenizer_is_loaded_after_the_first_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    with new_run(tmp_path) as store:
        await fill(store, 2, 1)
    loaded: list[str] = []
    monkeypatch.setattr(module, "texts_of", lambda store: loaded.append(store.run_id))
    with Listing([store.folder]) as listing:
        documents = Documents(listing)
        thread = Thread(target=documents.prepare, args=(600,))
        thread.start()
        documents.answer("sources", {})
        assert loaded == []
        documents.answer(first, {} if first == "page" else {"run": store.run_id, "id": "t1/0"})
        thread.join(60)
        assert loaded == [store.run_id]


async def test_the_tokenizer_is_loaded_even_if_nothing_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with new_run(tmp_path) as store:
        await fill(store, 2, 1)
    loaded: list[str] = []
    monkeypatch.setattr(module, "texts_of", lambda store: loaded.append(store.run_id))
    with Listing([store.folder]) as listing:
        Documents(listing).prepare(0)
    assert loaded == [store.run_id]
