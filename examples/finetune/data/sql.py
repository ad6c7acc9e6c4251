"""A table's columns and a question -> one SELECT statement.

Tables of the held-out part do not occur in training. An answer is right when running it gives what the reference gives,
on rows generated for that table.
"""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from examples.finetune.data import Example

METRICS: Mapping[str, str] = {
    "runs": "answers that are one SELECT statement which sqlite runs",
    "execution": "answers whose rows equal the reference's",
    "exact": "answers equal to the reference, letter by letter",
}

ROWS = 24


@dataclass(frozen=True, slots=True)
class Table:
    """A table with a label column, one text column to filter by and one number column.

    one, many: what a row is called. values: of the text column.
    """

    name: str
    one: str
    many: str
    label: str
    text: str
    number: str
    values: tuple[str, ...]

    @property
    def columns(self) -> tuple[str, ...]:
        return ("id", self.label, self.text, self.number)


TRAINING = (
    Table("employees", "employee", "employees", "name", "city", "salary", ("Paris", "Boston", "Tokyo", "Cairo")),
    Table("books", "book", "books", "title", "genre", "pages", ("fantasy", "crime", "poetry", "history")),
    Table("cars", "car", "cars", "model", "color", "price", ("red", "blue", "black", "white")),
    Table("students", "student", "students", "name", "major", "age", ("physics", "law", "music", "biology")),
    Table("movies", "movie", "movies", "title", "director", "year", ("Lang", "Varda", "Kubrick", "Ozu")),
    Table("cities", "city", "cities", "name", "country", "population", ("Spain", "Chile", "India", "Kenya")),
    Table("dogs", "dog", "dogs", "name", "breed", "weight", ("poodle", "beagle", "boxer", "husky")),
    Table("recipes", "recipe", "recipes", "name", "cuisine", "minutes", ("Thai", "Greek", "Mexican", "French")),
    Table("houses", "house", "houses", "address", "style", "rooms", ("modern", "gothic", "rustic", "colonial")),
    Table("players", "player", "players", "name", "team", "goals", ("Lions", "Eagles", "Sharks", "Wolves")),
    Table("flights", "flight", "flights", "code", "airline", "distance", ("Condor", "Delta", "Iberia", "Finnair")),
    Table("paintings", "painting", "paintings", "title", "artist", "value", ("Monet", "Klee", "Goya", "Kahlo")),
)

HELD_OUT = (
    Table("singers", "singer", "singers", "name", "language", "albums", ("German", "Arabic", "Hindi", "Dutch")),
    Table("boats", "boat", "boats", "name", "harbor", "length", ("Bergen", "Split", "Genoa", "Porto")),
    Table("plants", "plant", "plants", "name", "family", "height", ("cactus", "fern", "orchid", "palm")),
)

Question = Callable[[Table, str, int], tuple[str, str]]
"""(table, a value of its text column, a number) -> (question, statement)."""

QUESTIONS: tuple[Question, ...] = (
    lambda t, v, n: (f"How many {t.many} are there?", f"SELECT COUNT(*) FROM {t.name};"),
    lambda t, v, n: (
        f"How many {t.many} have the {t.text} {v}?",
        f"SELECT COUNT(*) FROM {t.name} WHERE {t.text} = '{v}';",
    ),
    lambda t, v, n: (f"List the {t.label} of all {t.many}.", f"SELECT {t.label} FROM {t.name};"),
    lambda t, v, n: (
        f"What is the {t.label} of each {t.one} with {t.text} {v}?",
        f"SELECT {t.label} FROM {t.name} WHERE {t.text} = '{v}';",
    ),
    lambda t, v, n: (
        f"Which {t.many} have a {t.number} above {n}?",
        f"SELECT {t.label} FROM {t.name} WHERE {t.number} > {n};",
    ),
    lambda t, v, n: (
        f"Which {t.many} have a {t.number} below {n}?",
        f"SELECT {t.label} FROM {t.name} WHERE {t.number} < {n};",
    ),
    lambda t, v, n: (f"What is the average {t.number}?", f"SELECT AVG({t.number}) FROM {t.name};"),
    lambda t, v, n: (f"What is the highest {t.number}?", f"SELECT MAX({t.number}) FROM {t.name};"),
    lambda t, v, n: (f"What is the lowest {t.number}?", f"SELECT MIN({t.number}) FROM {t.name};"),
    lambda t, v, n: (
        f"What is the total {t.number} of {t.many} with {t.text} {v}?",
        f"SELECT SUM({t.number}) FROM {t.name} WHERE {t.text} = '{v}';",
    ),
    lambda t, v, n: (
        f"Show the {t.one} with the highest {t.number}.",
        f"SELECT {t.label} FROM {t.name} ORDER BY {t.number} DESC LIMIT 1;",
    ),
    lambda t, v, n: (f"Count the {t.many} by {t.text}.", f"SELECT {t.text}, COUNT(*) FROM {t.name} GROUP BY {t.text};"),
)


def ask(table: Table, question: Question, rng: random.Random) -> Example:
    words, statement = question(table, rng.choice(table.values), rng.randint(10, 90))
    prompt = f"Table {table.name}({', '.join(table.columns)}). {words}"
    return Example(prompt, statement, facts=table.name)


def training() -> list[Example]:
    rng = random.Random(31)
    return [ask(table, question, rng) for table in TRAINING for question in QUESTIONS for _ in range(5)]


def held_out() -> list[Example]:
    rng = random.Random(32)
    return [ask(table, question, rng) for table in HELD_OUT for question in QUESTIONS]


def database(table: Table) -> sqlite3.Connection:
    """The table with generated rows, in memory."""
    rng = random.Random(table.name)
    connection = sqlite3.connect(":memory:")
    connection.execute(f"CREATE TABLE {table.name} ({', '.join(table.columns)})")
    rows = [(i, f"{table.one} {i}", rng.choice(table.values), rng.randint(1, 100)) for i in range(ROWS)]
    connection.executemany(f"INSERT INTO {table.name} VALUES (?, ?, ?, ?)", rows)
    return connection


def run(connection: sqlite3.Connection, statement: str) -> list[tuple[object, ...]] | None:
    """The statement's rows, sorted; None when it is no SELECT or does not run."""
    if not statement.lstrip().upper().startswith("SELECT"):
        return None
    try:
        return sorted(connection.execute(statement).fetchall(), key=repr)
    except sqlite3.Error:
        return None


def judge(example: Example, answer: str) -> dict[str, float]:
    table = next(t for t in TRAINING + HELD_OUT if t.name == example.facts)
    connection = database(table)
    got = run(connection, answer)
    return {
        "runs": float(got is not None),
        "execution": float(got is not None and got == run(connection, example.answer)),
        "exact": float(answer.strip() == example.answer),
    }
