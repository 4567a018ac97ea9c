"""Ratings, tags and notes of people on finished episodes: `engine rate`, and the fact `review`."""

from engine.plugin import Plugin

PLUGIN = Plugin(
    name="reviews",
    about="Ratings, tags and notes of people on episodes",
    commands={"rate": "engine.plugins.reviews.command:rate"},
    hooks={"reviews": "engine.plugins.reviews.reviews:Reviews"},
)
