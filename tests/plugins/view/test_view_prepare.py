"""What is read before the first filter and the first tokens."""

from __future__ import annotations

from pathlib import Path
from threading import Thread

import pytest
from listing_kit import fill, new_run

from engine.plugins.show.listing.index import Index
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
    with Listing([store.folder], Index(None)) as listing:
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
    with Listing([store.folder], Index(None)) as listing:
        Documents(listing).prepare(0)
    assert loaded == [store.run_id]


async def test_preparing_reads_each_episode_once_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("index", "listing"):
        monkeypatch.setattr(f"engine.plugins.show.listing.{name}.CHUNK", 3)
    with new_run(tmp_path) as store:
        await fill(store, 5, 2)
    index = Index(None)
    read: list[int] = []
    detail = index.detail
    monkeypatch.setattr(index, "detail", lambda number, store, part: (read.extend(part), detail(number, store, part)))
    with Listing([store.folder], index) as listing:
        listing.prepare()
        assert len(read) == len(set(read)) == 10
        listing.page(filter="outcome.reward > 0.0")
        assert len(read) == 10
