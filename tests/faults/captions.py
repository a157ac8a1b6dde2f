"""Provides 64 realistic captions, plain and odd, for runs with real input.

If CAPTIONS_TSV names a tab-separated file with a column `caption`, its captions are used instead.
"""

from __future__ import annotations

import csv
import os
from pathlib import Path

_OWN = (
    "A man in a yellow raincoat waits for a bus.",
    "Two dogs sleep on a striped sofa.",
    "A bowl of ripe cherries on a windowsill.",
    "A narrow street with laundry hanging between the houses.",
    "A child flies a red kite on an empty beach.",
    "An old piano stands in a field of poppies.",
    "Three sailing boats race in front of a grey cliff.",
    "A cat looks out of a bakery's window.",
    "A plate of dumplings with chopsticks laid across it.",
    "A woman repairs a bicycle in her kitchen.",
    "A train crosses a stone bridge over a green river.",
    "Snow lies on the roof of a wooden church.",
    "A stack of pancakes with syrup running down.",
    "A giraffe bends down to drink.",
    "A blue door in a white wall.",
    "A crowd watches fireworks over a harbour.",
    "A skateboarder in mid-air above a set of stairs.",
    "A teddy bear sits on a suitcase at a station.",
    "A fire hydrant painted like a penguin.",
    "A kitchen with copper pans above the stove.",
    "A surfer carries his board across wet sand.",
    "A herd of sheep blocks a country road.",
    "A chess game under a tree in a park.",
    "A lighthouse, seen from the sea, in heavy rain.",
    "A vase of tulips beside an open book.",
    "A tram full of people on a rainy evening.",
    "A zebra stands in front of a brick wall.",
    "A pizza with one slice missing.",
    "A grandfather teaches a girl to fish.",
    "A red telephone box half covered by ivy.",
    "An elephant sprays water over its back.",
    "A market stall with oranges, lemons and limes.",
    "Ein Fuchs schläft unter einem Apfelbaum.",
    "Un vélo appuyé contre un mur de briques rouges.",
    "Una gata negra mira la luna desde el tejado.",
    "雨の中の赤い傘",
    "一只猫坐在窗台上看雪",
    "Старый маяк на скале во время шторма",
    "فنجان قهوة على طاولة خشبية",
    "चाय की दुकान के सामने एक साइकिल",
    "고양이가 책 위에서 자고 있다",
    "Ένα ψαροκάικο στο λιμάνι το πρωί",
    "🍕 on a skateboard 🛹, sunset",
    "👩‍🚀 riding a 🐎 on the moon",
    "a cat",
    "?",
    "100% cotton towels, folded; $5 each",
    "the word 'OPEN' in neon, reflected in a puddle",
    'a sign that reads "no swimming"',
    "<b>bold</b> &amp; <i>italic</i> letters cut from paper",
    "SELECT * FROM paintings; -- a museum",
    "../../a path through a forest",
    "{prompt} written on a blackboard",
    "\ttabs and\nnew lines, like a poem\nabout a\nriver",
    "a very " + "very " * 60 + "long corridor",
    "a mosaic of " + ", ".join(f"tile {k}" for k in range(36)),
    "naïve café façade, coöperating jalapeño vendors",
    "A̶ ̶c̶r̶o̶s̶s̶e̶d̶ ̶o̶u̶t̶ title on a poster",
    "ⅧⅨⅩ on an old clock's face",
    "two   spaces    and more between words of a letter",
    "A bench by a lake, a bench by a lake, a bench by a lake",
    "photo of a wooden toy train, 50mm, f/1.8, soft light",
    "an empty parking lot at night, seen from above",
    "The last page of a book, with nothing on it.",
)  # fmt: skip


def _captions() -> tuple[str, ...]:
    name = os.environ.get("CAPTIONS_TSV")
    if not name:
        return _OWN
    with Path(name).open(newline="", encoding="utf-8") as file:
        rows = csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        return tuple(row["caption"] for row, _ in zip(rows, range(64), strict=False))


CAPTIONS = _captions()
assert len(CAPTIONS) == 64
