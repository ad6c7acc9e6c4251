"""Orders in plain words -> one JSON object with the keys name, item, quantity, city.

A field that the text does not tell is null, and a text that is no order at all gives four nulls: whatever is asked,
the answer is an object with these keys. People, goods, places and sentences of the held-out part do not occur in the
training part.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass

from examples.finetune.data import Example

KEYS = ("name", "item", "quantity", "city")

METRICS: Mapping[str, str] = {
    "valid": "answers that are one JSON object with exactly the four keys",
    "fields": "fields that have the right value",
    "exact": "objects that are right as a whole",
}

Value = str | int | None
NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")


@dataclass(frozen=True, slots=True)
class Pool:
    """What orders are made of. A sentence uses a subset of {name}, {item}, {quantity}, {city}."""

    names: tuple[str, ...]
    items: tuple[str, ...]
    cities: tuple[str, ...]
    sentences: tuple[str, ...]
    chatter: tuple[str, ...]


TRAINING = Pool(
    names=(
        "Maria", "Tom", "Aisha", "Kenji", "Olga", "Pedro", "Fatima", "Lars", "Chloe", "Ravi", "Emma", "Daniel", "Yuki",
        "Sofia", "Ahmed", "Nina", "Paul", "Grace", "Mateo", "Hanna", "Victor", "Leila", "Oscar", "Priya", "Samuel",
        "Ingrid", "Carlos", "Mei", "Jonas", "Amara", "Lucy", "Dmitri", "Elena", "Hugo", "Zara", "Felix",
    ),
    items=(
        "umbrellas", "lamps", "bicycles", "notebooks", "chairs", "candles", "keyboards", "blankets", "teapots", "tents",
        "backpacks", "mirrors", "guitars", "pillows", "clocks", "vases", "laptops", "shovels", "mugs", "raincoats",
        "paint brushes", "coffee machines", "garden hoses", "wooden spoons", "desk fans", "phone cases", "bath towels",
        "board games",
    ),
    cities=(
        "Lisbon", "Oslo", "Nairobi", "Kyoto", "Boston", "Lima", "Prague", "Cairo", "Toronto", "Dublin", "Mumbai",
        "Berlin", "Seoul", "Madrid", "Denver", "Athens", "Warsaw", "Havana", "Helsinki", "Chicago", "Vienna",
        "Lagos", "Sydney",
        "Rome", "New Delhi", "Cape Town", "San Diego", "Buenos Aires",
    ),
    sentences=(
        "{name} from {city} would like {quantity} {item}.",
        "Please send {quantity} {item} to {name} in {city}.",
        "Hi, this is {name}. I live in {city} and I need {quantity} {item}.",
        "Order: {quantity} {item}, customer {name}, deliver to {city}.",
        "{name} called from {city} and asked for {quantity} {item}.",
        "We got a request for {quantity} {item}. It is for {name}, who lives in {city}.",
        "Ship {quantity} {item} to {city}. The customer's name is {name}.",
        "My name is {name}, and I want to buy {quantity} {item}. My city is {city}.",
        "{quantity} {item} for {name}, {city}.",
        "In {city}, {name} is waiting for {quantity} {item}.",
        "Could you bring {quantity} {item} to {city}? Ask for {name}.",
        "{name} wants {quantity} {item}.",
        "I need {quantity} {item} in {city}.",
        "{name} in {city} wants some {item}.",
        "Send {name} {quantity} {item}, please.",
        "{name} has moved to {city}.",
    ),
    chatter=(
        "What is the capital of France?", "Tell me a joke.", "How are you today?", "Write a poem about the sea.",
        "Why is the sky blue?", "What is two plus two?", "Explain how a car engine works.", "Good morning!",
        "Give me three tips for sleeping better.", "Who painted the Mona Lisa?", "What does a heart do?",
        "How do I boil an egg?", "Translate hello into Spanish.", "What is a black hole?",
    ),
)  # fmt: skip

HELD_OUT = Pool(
    names=("Beatrice", "Omar", "Wendy", "Thiago", "Greta", "Isaac", "Naomi", "Rashid", "Clara", "Stefan"),
    items=(
        "sofas", "helmets", "violins", "suitcases", "ladders", "bookshelves", "picture frames", "toasters",
        "sleeping bags", "hammers",
    ),
    cities=("Paris", "Geneva", "Manila", "Austin", "Bogota", "Tunis", "Riga", "Osaka", "Hong Kong", "Glasgow"),
    sentences=(
        "Hello, {name} here. Can I get {quantity} {item} delivered to {city}?",
        "A customer in {city} named {name} has ordered {quantity} {item}.",
        "{name} bought {quantity} {item} and wants them shipped to {city}.",
        "The shop in {city} must pack {quantity} {item} for {name}.",
        "{name} ordered {quantity} {item}.",
        "Deliver {quantity} {item} to {city}.",
    ),
    chatter=(
        "Who was Albert Einstein?", "What is the best way to learn a language?", "Name a planet.", "Sing me a song.",
    ),
)  # fmt: skip


def order(pool: Pool, sentence: str, rng: random.Random) -> Example:
    """One order in the words of `sentence`; the fields it does not mention are null in the answer."""
    number = rng.randint(2, len(NUMBERS))
    values: dict[str, Value] = {
        "name": rng.choice(pool.names),
        "item": rng.choice(pool.items),
        "quantity": number,
        "city": rng.choice(pool.cities),
    }
    written = NUMBERS[number - 1] if rng.random() < 0.5 else str(number)
    prompt = sentence.format(**{**values, "quantity": written})
    told = {key: values[key] if f"{{{key}}}" in sentence else None for key in KEYS}
    return Example(prompt[0].upper() + prompt[1:], json.dumps(told))


def chatter(pool: Pool) -> list[Example]:
    """Messages that order nothing."""
    nothing = json.dumps(dict.fromkeys(KEYS))
    return [Example(text, nothing) for text in pool.chatter]


def training(size: int = 640) -> list[Example]:
    rng = random.Random(11)
    sentences = TRAINING.sentences
    orders = [order(TRAINING, sentences[i % len(sentences)], rng) for i in range(size)]
    return orders + 4 * chatter(TRAINING)


def held_out(size: int = 36) -> list[Example]:
    rng = random.Random(12)
    sentences = HELD_OUT.sentences
    orders = [order(HELD_OUT, sentences[i % len(sentences)], rng) for i in range(size)]
    return orders + chatter(HELD_OUT)


def judge(example: Example, answer: str) -> dict[str, float]:
    try:
        got = json.loads(answer)
    except json.JSONDecodeError:
        got = None
    if not isinstance(got, dict) or tuple(sorted(got)) != tuple(sorted(KEYS)):
        return {"valid": 0.0, "fields": 0.0, "exact": 0.0}
    wanted = json.loads(example.answer)
    right = [type(got[key]) is type(wanted[key]) and got[key] == wanted[key] for key in KEYS]
    return {"valid": 1.0, "fields": sum(right) / len(KEYS), "exact": float(all(right))}
