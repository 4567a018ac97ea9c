"""Guess a hidden five-letter word; each guess is answered letter by letter.

`problems` makes the tasks, `WordGuess` runs the game. Each letter of a guess gets one of three marks: right place,
wrong place, absent.

Invariant: the marks are those of the usual game: a letter is marked (right or wrong place) at most as often as the
hidden word has it, right places first. The hidden word is a field of the task; the model sees it only after the last
guess.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, Literal

from engine.schemas.environment import EpisodeView, Reset, Step, Task
from engine.schemas.message import Message
from engine.schemas.reward import RewardEvent

WORDS: tuple[str, ...] = tuple(
    """
    actor adult alarm album angle apple apron arena armor aroma badge baker basin beach berry black blade blaze block
    board
    brain brave bread brick bride brown brush cabin cable camel candy canoe cargo chain chair chalk cheek chess chest
    child choir cider civic clean clerk cliff clock cloud clown coast coral couch crane crowd crown crumb curve daily
    dance diary dodge donor draft dream drill drink eagle earth elbow empty equal event fable fairy feast fence ferry
    fever field flame flock flood floor flour fluid frame fresh fruit ghost giant glass globe glove grain grape grass
    green guard guest habit happy heart hedge hobby honey horse hotel house hurry igloo ivory jelly jewel judge juice
    kayak knife label ladle laser lemon level light lilac linen llama logic lunar magic mango maple marsh medal melon
    metal miner model money motor mount mouse music night noble north novel ocean olive onion opera orbit organ otter
    oxide paint panda paper patch peach pearl pedal penny piano pilot pizza plane plant plate poppy prize proof puppy
    quail queen quiet quilt radar radio ranch raven rider river robin robot round royal salad salsa scarf scene
    sheep shelf shell shirt shoes silly skate sleep slice smile snail snake solar spice spoon stage stamp steam stone
    storm story sugar sunny swamp table teeth tiger toast tooth torch tower toxic trail train trunk truth tulip twist
    uncle under unity valve video villa vivid voice wagon waist watch water whale wheat wheel woman world wrist yacht
    young zebra
    """.split()  # noqa: SIM905  (a list of 249 strings would be ten times as long)
)
"""Words that `problems` hides."""

HELD_OUT = 5
"""One word in this many is held out."""

_GUESS = re.compile(r"<guess>\s*([A-Za-z]+)\s*</guess>")
_WORDS_OF = {"right": "right place", "wrong": "wrong place", "absent": "absent"}

Mark = Literal["right", "wrong", "absent"]


def problems(count: int = 64, seed: int = 0, held_out: bool = False) -> Iterator[dict[str, Any]]:
    """Rows with `id` and `word`, the same for the same arguments.

    Args:
        count: How many. A word is hidden again only after all others.
        seed: Seeds the order of the words.
        held_out: Hide the words that are kept from training, instead of the others.
    """
    words = [word for index, word in enumerate(WORDS) if (index % HELD_OUT == 0) is held_out]
    random.Random(f"word_guess/{seed}").shuffle(words)
    for index in range(count):
        kind = "held-out" if held_out else "word"
        yield {"id": f"{kind}-{seed}-{index:04d}", "word": words[index % len(words)]}


def marks(guess: str, word: str) -> list[Mark]:
    """The mark of each letter of `guess`; both words have the same length."""
    left = Counter(hidden for tried, hidden in zip(guess, word, strict=True) if tried != hidden)
    letter_marks: list[Mark] = []
    for tried, hidden in zip(guess, word, strict=True):
        if tried == hidden:
            letter_marks.append("right")
        elif left[tried]:
            left[tried] -= 1
            letter_marks.append("wrong")
        else:
            letter_marks.append("absent")
    return letter_marks


class WordGuess:
    """Runs the game for one word.

    Args:
        tries: Maximum number of replies. A reply without a word of the right length counts too.
        won: Reward `won` of the guess that is the word.
        progress: Reward `progress` for each place that this guess gets right and no earlier guess did.
        unreadable: Reward `format` of a reply without a guess.
    """

    events = ("marked", "over")

    def __init__(self, tries: int = 6, won: float = 1.0, progress: float = 0.0, unreadable: float = -0.1) -> None:
        if tries < 1:
            raise ValueError(f"tries is {tries}; write at least 1")
        self._tries = tries
        self._won = won
        self._progress = progress
        self._unreadable = unreadable

    def reset(self, task: Task, seed: int) -> Reset:
        """The rules, as the user's first message."""
        count = len(_word(task))
        words = f"Guess a word of {count} letters. You have {self._tries} tries. Write <guess>word</guess>."
        return Reset(messages=[Message(role="user", content=words)], facts={"tries": 0, "known": "_" * count})

    def step(self, view: EpisodeView) -> Step:
        """Mark a guess. The fact `known` has the letters whose places are right so far: `_r_n_`."""
        word = _word(view.task)
        tries, placed = int(view.facts["tries"]) + 1, str(view.facts["known"])
        guesses = _GUESS.findall(view.reply)
        guess = guesses[-1].lower() if guesses else ""
        if len(guess) != len(word):
            said = f"{guess!r} has {len(guess)} letters." if guess else "There is no guess."
            said += f" Write <guess>word</guess> with {len(word)} letters."
            rewards = [RewardEvent(name="format", value=self._unreadable, cause="no guess of the right length")]
            return self._next(tries, placed, said, rewards, word, solved=False)
        marked = marks(guess, word)
        now = "".join(
            letter if place == "right" else old for letter, place, old in zip(guess, marked, placed, strict=True)
        )
        rewards = []
        if self._progress and (new := placed.count("_") - now.count("_")):
            rewards.append(RewardEvent(name="progress", value=new * self._progress, cause=f"{new} more in place"))
        if guess == word:
            rewards.append(RewardEvent(name="won", value=self._won, cause=f"guessed at try {tries}"))
        said = ", ".join(f"{letter}: {_WORDS_OF[mark]}" for letter, mark in zip(guess, marked, strict=True)) + "."
        return self._next(tries, now, said, rewards, word, solved=guess == word)

    def _next(self, tries: int, known: str, said: str, rewards: list[RewardEvent], word: str, *, solved: bool) -> Step:
        facts = {"tries": tries, "known": known, "solved": solved}
        over = solved or tries >= self._tries
        if over:
            said = "That is the word." if solved else f"{said} The word was {word}."
        else:
            said = f"{said} {self._tries - tries} left."
        message = Message(role="user", content=said)
        return Step(event="over" if over else "marked", messages=[message], rewards=rewards, facts=facts)


def _word(task: Task) -> str:
    """The hidden word.

    Raises:
        ValueError: The task has no valid word.
    """
    word = task.fields.get("word")
    if not isinstance(word, str) or re.fullmatch(r"[a-z]{2,20}", word) is None:
        raise ValueError(
            f"task {task.id!r}: `word` is {word!r}; write 2 to 20 letters a to z, as "
            "`engine.environments.word_guess:problems` does"
        )
    return word
