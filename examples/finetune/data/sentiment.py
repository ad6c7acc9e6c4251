"""Short opinions -> one word: positive, negative or neutral.

Training sentences join a subject and a remark of ours; held-out ones were written whole, about other subjects and in
other words.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

from examples.finetune.data import Example

LABELS = ("positive", "negative", "neutral")

METRICS: Mapping[str, str] = {
    "one_word": "answers that are exactly one of the three words",
    "accuracy": "answers that are the right word",
}

SUBJECTS = (
    "The hotel", "This phone", "The movie", "My new laptop", "The restaurant", "The concert", "This book", "The museum",
    "The app", "The train ride", "This jacket", "The coffee shop", "The course", "The garden", "The game", "The doctor",
    "Our waiter", "The bakery", "The flight", "The song",
)  # fmt: skip

REMARKS: Mapping[str, tuple[str, ...]] = {
    "positive": (
        "was wonderful from start to finish.", "made my whole week.", "is better than I ever hoped.", "is a pure joy.",
        "was worth every penny, I would come back at once.", "impressed all of us.", "is the best I have known so far.",
        "was so good that I told all my friends about it.", "left me with a big smile.", "is excellent.",
        "has exceeded my expectations.", "was great fun for the children.", "is beautiful and works perfectly.",
        "never lets me down.", "was fantastic, thank you!", "is a lovely surprise.", "deserves five stars.",
        "was not bad at all, I really liked it.", "was kind and helpful.", "is superb, I love it.",
    ),
    "negative": (
        "was a terrible waste of money.", "ruined our evening.", "broke after two days.",
        "is far too expensive and ugly.",
        "was so boring that I nearly fell asleep.", "made me angry.", "is the worst I have ever seen.",
        "was dirty and loud.",
        "let us down again.", "is awful, stay away.", "was rude and slow.", "does not work at all.",
        "was not good, I want my money back.", "is a big disappointment.", "smelled bad and was cold.",
        "gave me nothing but trouble.", "was late, and nobody said sorry.", "is useless.",
        "was painful to sit through.",
        "is poorly made, I regret it.",
    ),
    "neutral": (
        "opens at nine in the morning.", "is on the second floor.", "was made in 2015.", "has a blue door.",
        "takes about two hours.", "belongs to a family from Ohio.", "comes in three sizes.", "is near the station.",
        "was neither good nor bad.", "is next to the library.", "starts on Monday.", "costs twenty dollars.",
        "has twelve chapters.", "is average, nothing special.", "was moved to another street last year.",
        "weighs about a kilogram.", "is closed on Sundays.", "was mentioned in the newspaper.", "is what it is.",
        "arrives in the afternoon.",
    ),
}  # fmt: skip

HELD_OUT: Mapping[str, tuple[str, ...]] = {
    "positive": (
        "I adore these headphones, the sound is crystal clear.", "What a delightful dinner we had last night!",
        "Great service and friendly people.", "My daughter loves her new bike.",
        "The view from the balcony took our breath away.", "Best pizza in town, hands down.",
        "I could not be happier with this camera.", "The lecture was inspiring and easy to follow.",
        "Amazing quality for such a small price.", "We laughed all night, what a brilliant show.",
        "The repair was quick and the staff were very nice.", "This pillow gave me the best sleep in years.",
    ),
    "negative": (
        "The soup was cold and tasted like soap.", "I hate how slow this computer is.",
        "Horrible customer support, nobody ever answers.", "The zipper tore the first time I used it.",
        "We waited an hour and then they cancelled our table.", "Worst holiday of my life.",
        "The plot makes no sense and the acting is dreadful.", "My package arrived damaged and incomplete.",
        "I will never buy from this shop again.", "The room had mold on the walls and no hot water.",
        "This update made everything worse.", "Such a disappointing match, we left early.",
    ),
    "neutral": (
        "The meeting is scheduled for Thursday at ten.", "The package contains four screws and a manual.",
        "The bus stops in front of the school.", "He bought a ticket to Hamburg.", "The box is made of cardboard.",
        "The store sells shoes and bags.", "Her office has two windows.", "The report has forty pages.",
        "The bridge was built in 1932.", "The recipe calls for three eggs.",
        "They live in an apartment on Main Street.",
        "The printer uses black and white ink.",
    ),
}  # fmt: skip


def training() -> list[Example]:
    rng = random.Random(21)
    pairs = [(f"{subject} {remark}", label) for label in LABELS for remark in REMARKS[label] for subject in SUBJECTS]
    return [Example(text, label) for text, label in rng.sample(pairs, len(pairs))]


def held_out() -> list[Example]:
    return [Example(text, label) for label in LABELS for text in HELD_OUT[label]]


def judge(example: Example, answer: str) -> dict[str, float]:
    word = answer.strip()
    return {"one_word": float(word in LABELS), "accuracy": float(word == example.answer)}
