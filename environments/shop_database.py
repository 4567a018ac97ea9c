"""A small shop's database and questions about it, for `engine.environments.text_to_sql`.

Invariant: a database is a pure function of its seed, and each question has exactly one answer in every database: prices are whole
numbers, and ties are broken by the question.
"""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from functools import lru_cache
from typing import Any

HELD_OUT = 5
"""One question in this many is held out."""

SCHEMA = """
CREATE TABLE customers (id INTEGER PRIMARY KEY, name TEXT NOT NULL, city TEXT NOT NULL);
CREATE TABLE products (id INTEGER PRIMARY KEY, name TEXT NOT NULL, category TEXT NOT NULL, price INTEGER NOT NULL);
CREATE TABLE orders (id INTEGER PRIMARY KEY, customer_id INTEGER NOT NULL REFERENCES customers (id), day TEXT NOT NULL);
CREATE TABLE items (order_id INTEGER NOT NULL REFERENCES orders (id), product_id INTEGER NOT NULL REFERENCES products (id), quantity INTEGER NOT NULL);
"""
"""`day` is written as 2024-05-31."""

_CITIES = ("Aarhus", "Bergen", "Ghent", "Leeds", "Porto", "Split", "Tartu", "Vigo")
_FIRST = ("Ada", "Bo", "Cleo", "Dora", "Eli", "Fay", "Gus", "Hana", "Ivo", "June", "Kai", "Lena")
_LAST = ("Berg", "Costa", "Dahl", "Evans", "Fischer", "Grant", "Horvat", "Jansen")
_PRODUCTS = {
    "garden": ("hose", "rake", "spade", "trowel", "watering can"),
    "kitchen": ("kettle", "ladle", "pan", "sieve", "whisk"),
    "office": ("desk lamp", "folder", "pen", "ruler", "stapler"),
    "sports": ("ball", "helmet", "racket", "rope", "whistle"),
}
_YEARS = (2022, 2023, 2024)


@lru_cache(maxsize=64)
def shop(seed: int) -> bytes:
    """The shop's database as a SQLite file: 40 customers, 20 products, 120 orders with 1 to 4 items each."""
    rng = random.Random(f"shop/{seed}")
    names = rng.sample([f"{first} {last}" for first in _FIRST for last in _LAST], 40)
    customers = [(number, name, rng.choice(_CITIES)) for number, name in enumerate(names, 1)]
    kinds = [(name, category) for category, group in _PRODUCTS.items() for name in group]
    products = [(number, name, category, rng.randint(2, 90)) for number, (name, category) in enumerate(kinds, 1)]
    buyers = rng.sample(range(1, 41), 34)  # six customers have no order
    orders, items = [], []
    for number in range(1, 121):
        day = f"{rng.choice(_YEARS)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"
        orders.append((number, rng.choice(buyers), day))
        for product in rng.sample(range(1, 21), rng.randint(1, 4)):
            items.append((number, product, rng.randint(1, 5)))
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(SCHEMA)
        connection.executemany("INSERT INTO customers VALUES (?, ?, ?)", customers)
        connection.executemany("INSERT INTO products VALUES (?, ?, ?, ?)", products)
        connection.executemany("INSERT INTO orders VALUES (?, ?, ?)", orders)
        connection.executemany("INSERT INTO items VALUES (?, ?, ?)", items)
        connection.commit()
        return connection.serialize()


_TEMPLATES: tuple[tuple[str, str, bool], ...] = (
    ("How many customers live in {city}?", "SELECT COUNT(*) FROM customers WHERE city = '{city}'", False),
    (
        "How many orders were placed in {year}?",
        "SELECT COUNT(*) FROM orders WHERE day LIKE '{year}-%'",
        False,
    ),
    (
        "Which products cost more than {price}? Give name and price, the most expensive first, equal prices by name.",
        "SELECT name, price FROM products WHERE price > {price} ORDER BY price DESC, name",
        True,
    ),
    (
        "What is the revenue (price times quantity, summed) of the category {category}?",
        "SELECT SUM(price * quantity) FROM items JOIN products ON products.id = product_id WHERE category = '{category}'",
        False,
    ),
    (
        "Which customers from {city} have never placed an order? Give their names.",
        "SELECT name FROM customers WHERE city = '{city}' AND id NOT IN (SELECT customer_id FROM orders)",
        False,
    ),
    (
        "For each category, how many pieces were ordered in {year}? Give category and number of pieces.",
        "SELECT category, SUM(quantity) FROM items JOIN products ON products.id = product_id "
        "JOIN orders ON orders.id = order_id WHERE day LIKE '{year}-%' GROUP BY category",
        False,
    ),
    (
        "Which customers have ordered the product {product}? Give each name once.",
        "SELECT DISTINCT customers.name FROM customers JOIN orders ON customer_id = customers.id "
        "JOIN items ON order_id = orders.id JOIN products ON products.id = product_id WHERE products.name = '{product}'",
        False,
    ),
    (
        "Which customer has placed the most orders in {year}? If several have, take the first by name. Give the name.",
        "SELECT name FROM customers JOIN orders ON customer_id = customers.id WHERE day LIKE '{year}-%' "
        "GROUP BY customers.id ORDER BY COUNT(*) DESC, name LIMIT 1",
        False,
    ),
    (
        "Which cities have at least {count} customers? Give city and number of customers.",
        "SELECT city, COUNT(*) FROM customers GROUP BY city HAVING COUNT(*) >= {count}",
        False,
    ),
    (
        "What is the value (price times quantity, summed) of order {order}?",
        "SELECT SUM(price * quantity) FROM items JOIN products ON products.id = product_id WHERE order_id = {order}",
        False,
    ),
)
"""Question, query, and whether the order of the rows is part of the answer."""


def problems(count: int = 64, seed: int = 0, held_out: bool = False) -> Iterator[dict[str, Any]]:
    """Rows with `id`, `question`, `sql`, `ordered` and `shop` (the database's seed), the same for the same arguments.

    Args:
        count: How many.
        seed: Seeds the questions and databases.
        held_out: Make questions that are kept from training, instead of the others.
    """
    rng = random.Random(f"shop/problems/{seed}")
    for index in range(count):
        while True:
            template, sql, ordered = rng.choice(_TEMPLATES)
            category = rng.choice(list(_PRODUCTS))
            values = {
                "city": rng.choice(_CITIES),
                "year": rng.choice(_YEARS),
                "price": rng.randint(10, 70),
                "category": category,
                "product": rng.choice(_PRODUCTS[category]),
                "count": rng.randint(3, 6),
                "order": rng.randint(1, 120),
            }
            question = template.format(**values)
            if (random.Random(question).randrange(HELD_OUT) == 0) is held_out:
                break
        yield {
            "id": f"{'held-out' if held_out else 'sql'}-{seed}-{index:04d}",
            "question": question,
            "sql": sql.format(**values),
            "ordered": ordered,
            "shop": rng.randrange(10**6),
        }
