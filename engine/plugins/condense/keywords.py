"""Keywords of a text, by YAKE: statistical, without a model and without a download (Campos et al., 2020).

YAKE separates words at white space. Chinese, Japanese and Thai have none, so BudouX splits their text into phrases first, and a
keyword is one phrase.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from engine.plugins.condense.chunks import Count, missing_package
from engine.plugins.condense.spec import KeywordsSpec

_MOST = 200
"""Maximum number of keywords that are ranked."""


def keywords(text: str, spec: KeywordsSpec, count: Count) -> str:
    """The best keywords of a text, in the order in which they first occur, as many as the budget holds.

    Args:
        text: The text.
        spec: Language, length of a keyword, budget in tokens.
        count: Counts tokens.

    Raises:
        EngineError: a package is not installed (kind `no_package`).
    """
    extractor, phrases = _tools(spec.language, spec.ngram)
    words = text if phrases is None else " ".join(phrases(text))
    ranked = [keyword for keyword, _ in _ranked(extractor, words)]
    chosen: list[str] = []
    for keyword in ranked:
        if not any(keyword.lower() in other.lower() for other in chosen) and (
            count("; ".join([*chosen, keyword])) <= spec.tokens
        ):
            chosen.append(keyword)
    lowered = text.lower()
    return "; ".join(sorted(chosen, key=lambda keyword: lowered.find(keyword.lower())))


def _ranked(extractor: Any, words: str) -> list[tuple[str, float]]:
    try:
        found: list[tuple[str, float]] = extractor.extract_keywords(words)
    except ValueError:  # of a text without words, such as digits only
        return []
    return sorted(found, key=lambda item: (float(item[1]), item[0]))


@lru_cache(16)
def _tools(language: str, ngram: int) -> tuple[Any, Callable[[str], list[str]] | None]:
    try:
        import budoux
        import yake
    except ImportError as error:
        raise missing_package("condense.condenser: {kind: keywords}", error) from error
    parsers = {
        "zh": budoux.load_default_simplified_chinese_parser,
        "ja": budoux.load_default_japanese_parser,
        "th": budoux.load_default_thai_parser,
    }
    parser = parsers[language]() if language in parsers else None
    if parser is None:
        return yake.KeywordExtractor(lan=language, n=ngram, top=_MOST), None
    return yake.KeywordExtractor(lan=language, n=1, top=_MOST), parser.parse
