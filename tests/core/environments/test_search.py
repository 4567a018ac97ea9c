"""Search: passages by BM25 or over HTTP, answers by exact match."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from engine.environments.search import DATA, Search, normalised, problems
from engine.schemas.environment import Environment, EpisodeView, Task

pytest.importorskip("bm25s", reason="searching a file needs the extra `search`")

View = Callable[..., EpisodeView]
TASK = Task(id="t", index=0, fields={"question": "Who?", "answers": ["Edda Varnok", "Varnok"]})


def test_every_question_is_asked_once_before_one_comes_again() -> None:
    trained, held_out = (
        [row["question"] for row in problems(count, held_out=kept)] for count, kept in ((48, False), (12, True))
    )
    assert len(set(trained) | set(held_out)) == 60
    assert [row["id"] for row in problems(49)][48].endswith("-1")


def test_every_answer_is_in_the_corpus() -> None:
    corpus = (DATA / "passages.jsonl").read_text(encoding="utf-8")
    assert [row["id"] for row in problems(60) if row["answers"][0] not in corpus] == []


def test_passages_are_ranked_by_their_words() -> None:
    env = Search()
    assert isinstance(env, Environment)
    found = env.search("Who is the architect of the Long Bridge?", 2)
    assert [part.split("\n")[0] for part in found.split("\n\n")] == ["[1] Edda Varnok", "[2] The Long Bridge"]
    assert env.search("Who is the architect of the Long Bridge?", 2) == found
    assert env.search("xyzzy", 2) == "No passage has these words."
    with pytest.raises(ValueError, match="results is 0; write 1 to 5"):
        env.search("bridge", 0)


def test_a_file_of_ones_own_is_searched(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text(
        '{"text": "owls hunt at night"}\n\n{"title": "Bees", "text": "bees sleep at night"}\n', encoding="utf-8"
    )
    assert Search(corpus=str(path)).search("night bees") == "[1] Bees\nbees sleep at night\n\n[2] owls hunt at night"
    path.write_text('{"text": "a"}\n{"words": 1}\n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"own\.jsonl:2: write a JSON object"):
        Search(corpus=str(path))
    with pytest.raises(FileNotFoundError, match="there is no file"):
        Search(corpus=str(tmp_path / "none.jsonl"))


@pytest.mark.parametrize(
    ("answer", "plain"), [("The  Long Bridge.", "long bridge"), ("an Apple, a day", "apple day"), ("", "")]
)
def test_answers_are_compared_without_case_and_articles(answer: str, plain: str) -> None:
    assert normalised(answer) == plain


@pytest.mark.parametrize(
    ("reply", "rewards", "solved"),
    [
        ("<answer>varnok</answer>", ["form", "correct"], True),
        ("<answer>varnok</answer> or <answer>Lund</answer>", ["form"], False),
        ("Varnok", [], False),
    ],
)
def test_the_last_answer_is_graded(view: View, reply: str, rewards: list[str], solved: bool) -> None:
    step = Search().step(view(TASK, reply))
    assert ([reward.name for reward in step.rewards], step.facts) == (rewards, {"solved": solved})


@pytest.fixture
def retriever() -> Iterator[tuple[str, list[Any]]]:
    """A real server that answers as Search-R1's: its address, and the bodies that it was sent."""
    asked: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append(body)
            found = [{"document": {"contents": f"{name} of {self.path}"}, "score": 1} for name in "abc"]
            answer = json.dumps({"result": [found]} if self.path == "/retrieve" else {"hits": found}).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: Any) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    server.server_close()


@pytest.mark.slow
def test_any_retriever_is_asked_over_http(retriever: tuple[str, list[Any]]) -> None:
    url, asked = retriever
    assert Search(url=f"{url}/retrieve").search("who", 2) == "[1] a of /retrieve\n\n[2] b of /retrieve"
    own = Search(url=f"{url}/own", body={"q": {"text": "{query}"}, "k": "{results}"}, passages="hits.1.document")
    assert own.search("who", 1) == '[1] {"contents": "b of /own"}'
    with pytest.raises(ValueError, match=r"the retriever gave no passages .KeyError: 'result'"):
        Search(url=f"{url}/own").search("who", 1)
    assert asked[:2] == [{"queries": ["who"], "topk": 2, "return_scores": True}, {"q": {"text": "who"}, "k": 1}]


def test_a_retriever_that_is_gone_is_the_tools_error() -> None:
    with pytest.raises(ValueError, match=r"the retriever gave no passages .ConnectError"):
        Search(url="http://127.0.0.1:9/").search("who")


@pytest.mark.parametrize("changes", [{"corpus": "a", "url": "b"}, {"most": 0}, {"body": {}}, {"passages": "a"}])
def test_settings_that_contradict_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="write `"):
        Search(**changes)


@pytest.mark.parametrize("fields", [{}, {"question": "a"}, {"question": "a", "answers": []}])
def test_a_task_without_answers_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="task 't' needs"):
        Search().reset(Task(id="t", index=0, fields=fields), 0)
