"""The web app: who may ask, and what it answers."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from listing_kit import fill, new_run
from slow_cases import slow_after

from engine.plugins.show.listing.listing import Listing
from engine.plugins.view import assets
from engine.plugins.view.documents import NAMES, Documents
from engine.plugins.view.web import HEADERS, make_app

TOKEN = "a-token"
HOST = "127.0.0.1:8123"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six tasks with two samples each, all finished."""
    with new_run(tmp_path_factory.mktemp("runs")) as store:
        asyncio.run(fill(store))
    return store.folder


@pytest.fixture
def listing(run: Path) -> Iterator[Listing]:
    """Its episodes."""
    with Listing([run]) as found:
        yield found


def client(listing: Listing, *, token: str | None = TOKEN, host: str = HOST) -> httpx.AsyncClient:
    """A client of the app; the token is in the header."""
    headers = {"authorization": f"Bearer {token}"} if token is not None else {}
    transport = httpx.ASGITransport(make_app(Documents(listing), TOKEN))
    return httpx.AsyncClient(transport=transport, base_url=f"http://{host}", headers=headers)


@pytest.mark.parametrize(
    "path", slow_after(3, ["/", "/static/app.js", "/api/sources", "/api/page", "/api/image", "/nothing"])
)
@pytest.mark.parametrize("token", [None, "", "wrong", TOKEN + "x", TOKEN[:-1], "ä"])
async def test_a_request_without_the_token_is_refused(listing: Listing, path: str, token: str | None) -> None:
    async with client(listing, token=None) as asking:
        given = [(b"authorization", f"Bearer {token}".encode())] if token is not None else []
        answer = await asking.get(path, params={"token": "wrong"}, headers=given)
    assert answer.status_code == 403
    assert "episode" not in answer.text


@pytest.mark.parametrize(
    "host",
    [
        "example.org",
        "example.org:8123",
        "127.0.0.1.example.org:8123",
        "192.168.0.7:8123",
        "",
        "[::2]:80",
        "localhost.evil",
    ],
)
async def test_a_request_for_a_foreign_host_is_refused_even_with_the_token(listing: Listing, host: str) -> None:
    async with client(listing) as asking:
        asking.headers["host"] = host
        answer = await asking.get("/api/sources")
    assert answer.status_code == 403


@pytest.mark.parametrize("host", ["127.0.0.1:8123", "localhost:9000", "localhost", "[::1]:8123"])
async def test_every_name_and_port_of_the_loopback_interface_is_answered(listing: Listing, host: str) -> None:
    async with client(listing) as asking:
        asking.headers["host"] = host
        assert (await asking.get("/api/sources")).status_code == 200


async def test_the_token_in_the_address_becomes_a_cookie_that_scripts_cannot_read(listing: Listing) -> None:
    async with client(listing, token=None) as asking:
        answer = await asking.get("/", params={"token": TOKEN})
        assert answer.status_code == 303
        assert answer.headers["location"] == "/"
        cookie = answer.headers["set-cookie"].lower()
        assert "httponly" in cookie
        assert "samesite=lax" in cookie, "a link on another site opens a page; only this one's pages get documents"
        assert (await asking.get("/")).status_code == 200
        assert (await asking.get("/api/sources")).status_code == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
async def test_nothing_can_be_changed(listing: Listing, method: str) -> None:
    async with client(listing) as asking:
        assert (await asking.request(method, "/api/page")).status_code == 405


async def test_a_review_is_stored_and_needs_the_token_a_page_of_the_app_and_json(listing: Listing) -> None:
    row = listing.page("episode.status == 'done'").rows[0]
    review = {"run": row.run, "id": row.episode, "rating": 1, "tags": ["fair"], "note": "<b>well</b>"}
    async with client(listing) as asking:
        foreign = await asking.post("/api/review", json=review, headers={"sec-fetch-site": "cross-site"})
        form = await asking.post("/api/review", content=json.dumps(review), headers={"content-type": "text/plain"})
        partial = await asking.post("/api/review", json={"run": row.run, "id": row.episode})
        wrong = await asking.post("/api/review", json={**review, "tags": ["two words"]})
        assert [answer.status_code for answer in (foreign, form, partial, wrong)] == [403, 405, 400, 400]
        reviewer = (await asking.get("/api/sources")).json()["reviewer"]
        (stored,) = (await asking.post("/api/review", json=review)).json()
        shown = (await asking.get("/api/episode", params={"run": row.run, "id": row.episode})).json()
        chosen = (await asking.get("/api/page", params={"filter": "facts.review.rating > 0"})).json()
    async with client(listing, token=None) as stranger:
        assert (await stranger.post("/api/review", json=review)).status_code == 403
    assert (stored["by"], stored["rating"], stored["tags"], stored["note"]) == (reviewer, 1.0, ["fair"], "<b>well</b>")
    assert shown["reviews"] == [stored]
    assert [(one["episode"], one["review"]["tags"]) for one in chosen["rows"]] == [(row.episode, ["fair"])]
    assert len((listing.store(row.run).folder / "reviews.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize(
    "path", ["/", "/static/app.js", "/static/no.js", "/api/sources", "/api/none", "/api/image?run=x&digest=y", "/x"]
)
async def test_every_answer_has_the_headers_of_safety(listing: Listing, path: str) -> None:
    async with client(listing) as asking:
        answer = await asking.get(path)
    assert {name: answer.headers[name] for name in HEADERS} == HEADERS
    policy = answer.headers["content-security-policy"]
    assert "unsafe" not in policy
    assert "script-src 'self'" in policy


async def test_a_page_holds_no_script_and_no_style_of_its_own() -> None:
    page = assets.read("index.html") or ""
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\son\w+=|\sstyle=", page)


@pytest.mark.parametrize(
    "name", ["../web.py", "..%2fweb.py", "app.js/..", "style.CSS", "/etc/passwd", "app.py", "page"]
)
async def test_only_the_files_of_the_pages_are_answered(listing: Listing, name: str) -> None:
    async with client(listing) as asking:
        assert (await asking.get(f"/static/{name}")).status_code == 404


async def test_documents_are_answered_by_name(listing: Listing) -> None:
    key = listing.sources[0].key
    async with client(listing) as asking:
        page = (await asking.get("/api/page", params={"filter": "outcome.solved", "limit": "2"})).json()
        assert page["total"] == 4
        assert [row["episode"] for row in page["rows"]] == ["t2/0", "t2/1"]
        episode = (await asking.get("/api/episode", params={"run": key, "id": "t2/0"})).json()
        assert episode["episode"] == "t2/0"
        group = (await asking.get("/api/group", params={"run": key, "task": "t2"})).json()
        assert [each["episode"] for each in group["samples"]] == ["t2/0", "t2/1"]
        assert [(each["first"], each["second"]) for each in group["parts"]] == [(0, 1)]


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("/api/none", "there is no document `none`"),
        ("/api/__init__", "there is no document"),
        ("/api/answer", "there is no document"),
        ("/api/page?limt=3", "unknown parameter `limt`"),
        ("/api/page?limit=many", "`limit` must be a number"),
        ("/api/page?filter=outcome.rewad", "did you mean"),
        ("/api/page?sort=x", "sort"),
        ("/api/episode?run=x&id=y", "there is no run `x`"),
        ("/api/episode?id=y", "the parameter `run` is missing"),
    ],
)
async def test_an_error_says_what_is_wrong(listing: Listing, path: str, told: str) -> None:
    async with client(listing) as asking:
        answer = await asking.get(path)
    assert answer.status_code == 404
    assert told in answer.json()["error"]


def test_every_document_that_the_pages_ask_for_exists() -> None:
    pages = [each.stem for each in (Path(assets.__file__).parent / "page").glob("*.js")]
    asked = {name for page in pages for name in re.findall(r'(?<![.\w])get\("(\w+)"', assets.read(f"{page}.js") or "")}
    assert asked == set(NAMES)


def test_the_modules_of_the_pages_can_be_put_into_one_script() -> None:
    pages = {each.stem for each in (Path(assets.__file__).parent / "page").glob("*.js")}
    script = assets.one_script()
    assert not re.search(r"^(import|export)\b", script, re.MULTILINE), (
        "an import or export in another form than assets.py reads"
    )
    assert "</script" not in script
    names = re.findall(r"^(?:async )?(?:function|const|let|class) (\w+)", script, re.MULTILINE)
    assert len(names) == len(set(names)), sorted(name for name in names if names.count(name) > 1)
    reached = {assets.ENTRY}
    while more := {other for module in reached for other in assets.imports_of(module)} - reached:
        reached |= more
    assert reached == pages


def test_no_page_makes_html_from_text() -> None:
    for page in (Path(assets.__file__).parent / "page").glob("*.js"):
        found = re.findall(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|createContextualFragment",
            page.read_text(),
        )
        assert not found, page
