"""A toy corpus: a small grammar that writes English sentences and their French translations.

It stands in for a real corpus where one is too large: in a test, in a first run on a laptop, in a lesson.
All of it is computed, so there is nothing to download, and a small model learns it in minutes.

The validation and test splits ask for more than memory. A sentence is described by its triples (verb, noun,
polarity): "I don't like pineapples and oranges." holds (like, pineapple, -) and (like, orange, -). A few
triples are held out, and no sentence that holds one of them is in training. So a model has seen each word of
a test sentence, but some verb of it never with that noun in that polarity. The polarity is "+" for a
statement, "-" for a negated one and "?" for a question: "Do you like oranges?" may be in training although
"I like oranges." is held out.
"""

import itertools
import random
import re
from typing import Literal, NamedTuple

from mtrain.data import Pair

Split = Literal["train", "validation", "test"]
Polarity = Literal["+", "-", "?"]
Kind = Literal["food", "drink", "thing"]
Determiner = Literal["bare", "a", "the"]

SEED = 178  # one with which the held-out triples spread evenly: one to four for each noun
SIZES: dict[Split, int] = {"train": 5000, "validation": 300, "test": 300}

POLARITIES: tuple[Polarity, ...] = ("+", "-", "?")
CONTRASTS: tuple[tuple[Polarity, Polarity], ...] = (("+", "-"), ("-", "+"))  # on both sides of a "but"


class Subject(NamedTuple):
    english: str
    french: str
    person: int  # index into Verb.french: 0 je, 1 tu, 2 il/elle, 3 nous, 4 ils


class Verb(NamedTuple):
    english: str
    french: tuple[str, str, str, str, str]
    feeling: bool = False  # French likes "les oranges", with the article, where it eats "des oranges"
    kinds: tuple[Kind, ...] = ("food", "drink", "thing")  # what one can do this to


class Colour(NamedTuple):
    english: str
    masculine: str
    feminine: str


class Noun(NamedTuple):
    english: tuple[str, str]  # singular and plural; no plural for what is not counted, such as water
    french: tuple[str, str]
    gender: Literal["m", "f"]
    kind: Kind
    colours: tuple[Colour, ...] = ()


# "You" is always the familiar "tu", and "they" is always "ils", so that a source has one translation.
PRONOUNS = (
    Subject("I", "je", 0),
    Subject("you", "tu", 1),
    Subject("he", "il", 2),
    Subject("she", "elle", 2),
    Subject("we", "nous", 3),
    Subject("they", "ils", 4),
)
SUBJECTS = (
    *PRONOUNS,
    Subject("Marie", "Marie", 2),
    Subject("Paul", "Paul", 2),
    Subject("Anne", "Anne", 2),
    Subject("my sister", "ma sœur", 2),
    Subject("my brother", "mon frère", 2),
    Subject("the children", "les enfants", 4),
)
VERBS = (
    Verb("like", ("aime", "aimes", "aime", "aimons", "aiment"), feeling=True),
    Verb("love", ("adore", "adores", "adore", "adorons", "adorent"), feeling=True),
    Verb("hate", ("déteste", "détestes", "déteste", "détestons", "détestent"), feeling=True),
    Verb("eat", ("mange", "manges", "mange", "mangeons", "mangent"), kinds=("food",)),
    Verb("drink", ("bois", "bois", "boit", "buvons", "boivent"), kinds=("drink",)),
    Verb("buy", ("achète", "achètes", "achète", "achetons", "achètent")),
    Verb("sell", ("vends", "vends", "vend", "vendons", "vendent")),
    Verb("want", ("veux", "veux", "veut", "voulons", "veulent")),
    Verb("see", ("vois", "vois", "voit", "voyons", "voient")),
    Verb("choose", ("choisis", "choisis", "choisit", "choisissons", "choisissent")),
)
RED = Colour("red", "rouge", "rouge")
GREEN = Colour("green", "vert", "verte")
YELLOW = Colour("yellow", "jaune", "jaune")
BLACK = Colour("black", "noir", "noire")
WHITE = Colour("white", "blanc", "blanche")
NOUNS = (
    Noun(("orange", "oranges"), ("orange", "oranges"), "f", "food"),
    Noun(("pineapple", "pineapples"), ("ananas", "ananas"), "m", "food"),
    Noun(("apple", "apples"), ("pomme", "pommes"), "f", "food", (RED, GREEN)),
    Noun(("pear", "pears"), ("poire", "poires"), "f", "food", (GREEN, YELLOW)),
    Noun(("cherry", "cherries"), ("cerise", "cerises"), "f", "food", (RED, BLACK)),
    Noun(("lemon", "lemons"), ("citron", "citrons"), "m", "food", (YELLOW,)),
    Noun(("tomato", "tomatoes"), ("tomate", "tomates"), "f", "food", (RED, GREEN)),
    Noun(("onion", "onions"), ("oignon", "oignons"), "m", "food", (RED, YELLOW, WHITE)),
    Noun(("bean", "beans"), ("haricot", "haricots"), "m", "food", (RED, GREEN, WHITE)),
    Noun(("egg", "eggs"), ("œuf", "œufs"), "m", "food"),
    Noun(("oyster", "oysters"), ("huître", "huîtres"), "f", "food"),
    Noun(("cake", "cakes"), ("gâteau", "gâteaux"), "m", "food"),
    Noun(("bread", ""), ("pain", ""), "m", "food", (WHITE, BLACK)),
    Noun(("rice", ""), ("riz", ""), "m", "food", (WHITE, RED)),
    Noun(("water", ""), ("eau", ""), "f", "drink"),
    Noun(("milk", ""), ("lait", ""), "m", "drink"),
    Noun(("tea", ""), ("thé", ""), "m", "drink", (GREEN, BLACK)),
    Noun(("coffee", ""), ("café", ""), "m", "drink", (BLACK,)),
    Noun(("wine", ""), ("vin", ""), "m", "drink", (RED, WHITE)),
    Noun(("book", "books"), ("livre", "livres"), "m", "thing", (RED, GREEN, BLACK)),
    Noun(("flower", "flowers"), ("fleur", "fleurs"), "f", "thing", (RED, YELLOW, WHITE)),
    Noun(("horse", "horses"), ("cheval", "chevaux"), "m", "thing", (BLACK, WHITE)),
)
ADVERBS = (("today", "aujourd'hui"), ("every day", "tous les jours"), ("on Sundays", "le dimanche"))

# "Je", "ne", "de", "le", "la" and "que" lose their vowel before another, and before a mute h ("l'huître").
# The h of "haricot" is aspirated and counts as a consonant ("le haricot").
ELISION = re.compile(r"\b(j|n|d|l|qu)[ea] (?=[aàâeéèêiîoôœu]|h(?!aricot))", re.IGNORECASE)


class Triple(NamedTuple):
    """What a clause says, whoever says it, and whatever the article, the number and the colour."""

    verb: str
    noun: str
    polarity: Polarity


class Sentence(NamedTuple):
    """A sentence in both languages, and the triples that decide which split it belongs to."""

    pair: Pair
    triples: tuple[Triple, ...]


class Phrase(NamedTuple):
    noun: Noun
    determiner: Determiner
    plural: bool
    colour: Colour | None = None


class Clause(NamedTuple):
    subject: Subject
    verb: Verb
    objects: tuple[Phrase, ...]
    polarity: Polarity
    adverb: tuple[str, str] = ("", "")


def english_phrase(phrase: Phrase) -> str:
    noun = phrase.noun.english[phrase.plural]
    text = f"{phrase.colour.english} {noun}" if phrase.colour else noun
    if phrase.determiner == "a":
        return f"an {text}" if text[0] in "aeiou" else f"a {text}"
    return f"the {text}" if phrase.determiner == "the" else text


def english_clause(clause: Clause) -> str:
    subject, verb = clause.subject.english, clause.verb.english
    third = clause.subject.person == 2
    do = "does" if third else "do"
    joint = " or " if joined_by_or(clause) else " and "
    objects = joint.join(english_phrase(phrase) for phrase in clause.objects)
    if clause.polarity == "?":
        start = f"{do} {subject} {verb}"
    elif clause.polarity == "-":
        start = f"{subject} {do}n't {verb}"
    else:
        start = f"{subject} {verb}{'s' if third else ''}"
    return f"{start} {objects} {clause.adverb[0]}".strip()


def joined_by_or(clause: Clause) -> bool:
    """Whether two objects are joined by "or" and "ni": French does not say "pas de pommes et de poires"."""
    return clause.polarity == "-" and not clause.verb.feeling


def french_article(phrase: Phrase, clause: Clause) -> str:
    feminine = phrase.noun.gender == "f"
    definite = "les" if phrase.plural else "la" if feminine else "le"
    if phrase.determiner == "the" or clause.verb.feeling:
        return definite
    if clause.polarity == "-":
        return "de"
    if phrase.determiner == "a":
        return "une" if feminine else "un"
    return "des" if phrase.plural else f"de {definite}"


def french_phrase(phrase: Phrase, clause: Clause) -> str:
    text = f"{french_article(phrase, clause)} {phrase.noun.french[phrase.plural]}"
    if phrase.colour is None:
        return text
    colour = phrase.colour.feminine if phrase.noun.gender == "f" else phrase.colour.masculine
    return f"{text} {colour}{'s' if phrase.plural else ''}"


def french_clause(clause: Clause) -> str:
    subject, verb = clause.subject.french, clause.verb.french[clause.subject.person]
    joint = " ni " if joined_by_or(clause) else " et "
    objects = joint.join(french_phrase(phrase, clause) for phrase in clause.objects)
    if clause.polarity == "?":
        start = f"est-ce que {subject} {verb}"
    elif clause.polarity == "-":
        start = f"{subject} ne {verb} pas"
    else:
        start = f"{subject} {verb}"
    # Elision comes first: "de le ananas" becomes "de l'ananas", and only the "de le" that remain become "du".
    text = ELISION.sub(r"\1'", f"{start} {objects} {clause.adverb[1]}".strip())
    return text.replace(" de le ", " du ")


def write(*clauses: Clause) -> Sentence:
    """Write out a sentence of one clause, or of two joined by "but"."""
    english = ", but ".join(map(english_clause, clauses))
    french = ", mais ".join(map(french_clause, clauses))
    question = clauses[0].polarity == "?"
    pair = Pair(
        source=english[0].upper() + english[1:] + ("?" if question else "."),
        target=french[0].upper() + french[1:] + (" ?" if question else "."),  # French has a space before "?"
    )
    triples = tuple(Triple(c.verb.english, o.noun.english[0], c.polarity) for c in clauses for o in c.objects)
    return Sentence(pair, triples)


def nouns_of(verb: Verb) -> list[Noun]:
    return [noun for noun in NOUNS if noun.kind in verb.kinds]


def draw_bare(rng: random.Random, noun: Noun) -> Phrase:
    """The noun without an article, in the plural if it has one, at times with a colour."""
    colour = rng.choice(noun.colours) if noun.colours and rng.random() < 0.3 else None
    return Phrase(noun, "bare", bool(noun.english[1]), colour)


def draw_phrase(rng: random.Random, noun: Noun, verb: Verb, polarity: Polarity) -> Phrase:
    """The noun with any article that sounds natural, or with none."""
    phrase = draw_bare(rng, noun)
    determiners: list[Determiner] = ["bare", "bare", "the"]
    # "I like an orange" and "I don't eat an orange" can be said, but hardly ever are.
    if phrase.plural and not verb.feeling and polarity != "-":
        determiners.append("a")
    determiner = rng.choice(determiners)
    singular = determiner == "a" or (determiner == "the" and rng.random() < 0.5)
    return phrase._replace(determiner=determiner, plural=phrase.plural and not singular)


def draw_adverb(rng: random.Random, verb: Verb, phrase: Phrase) -> tuple[str, str]:
    """Now and then an adverb, where it makes sense: not in "I eat the orange every day."."""
    sensible = not verb.feeling and phrase.determiner != "the"
    return rng.choice(ADVERBS) if sensible and rng.random() < 0.3 else ("", "")


def draw_sentence(rng: random.Random) -> Sentence:
    """Draw one sentence: mostly a clause with one object or with two, sometimes two clauses and a "but"."""
    subject, verb, polarity = rng.choice(SUBJECTS), rng.choice(VERBS), rng.choice(POLARITIES)
    first, second = rng.sample(nouns_of(verb), 2)
    shape = rng.choices(("one object", "two objects", "but"), weights=(5, 3, 2))[0]
    if shape == "but":
        before, after = rng.choice(CONTRASTS)
        other = rng.choice(PRONOUNS)  # "Paul likes pears, but Paul doesn't like eggs." is clumsy
        return write(
            Clause(subject, verb, (draw_bare(rng, first),), before),
            Clause(other, verb, (draw_bare(rng, second),), after),
        )
    if shape == "two objects":
        objects: tuple[Phrase, ...] = (draw_bare(rng, first), draw_bare(rng, second))
    else:
        objects = (draw_phrase(rng, first, verb, polarity),)
    return write(Clause(subject, verb, objects, polarity, draw_adverb(rng, verb, objects[0])))


def seed_sentences() -> list[Sentence]:
    """The two sentences the corpus grew from. They open the test split: their triples are all held out."""
    subject, verb = SUBJECTS[0], VERBS[0]
    orange, pineapple = (Phrase(noun, "bare", plural=True) for noun in NOUNS[:2])
    return [
        write(Clause(subject, verb, (orange,), "+")),
        write(Clause(subject, verb, (pineapple, orange), "-")),
    ]


def held_out(rng: random.Random) -> tuple[set[Triple], set[Triple]]:
    """Draw the triples that only validation may hold, and those that only test may hold: 9 % in all.

    Each verb in each polarity gives one noun to either split, and so keeps most of its nouns for training.
    A verb with few nouns keeps them all: had nobody drunk water in training, nobody could learn to say it.
    """
    validation: set[Triple] = set()
    test = {triple for sentence in seed_sentences() for triple in sentence.triples}
    for verb, polarity in itertools.product(VERBS, POLARITIES):
        triples = [Triple(verb.english, noun.english[0], polarity) for noun in nouns_of(verb)]
        if len(triples) >= 10:
            one, other = rng.sample([triple for triple in triples if triple not in test], 2)
            validation.add(one)
            test.add(other)
    return validation, test


def split_of(sentence: Sentence, validation: set[Triple], test: set[Triple]) -> Split | None:
    """The split a sentence belongs to; none if it mixes triples held out for validation and for test."""
    in_validation = not validation.isdisjoint(sentence.triples)
    in_test = not test.isdisjoint(sentence.triples)
    if in_validation and in_test:
        return None
    return "validation" if in_validation else "test" if in_test else "train"


def toy_sentences(split: Split) -> list[Sentence]:
    """The sentences of a split with their triples, for whoever wants to check what was held out.

    Nothing depends on the time or on the machine: a split is the same, in the same order, at every call.
    """
    rng = random.Random(SEED)
    validation, test = held_out(rng)
    found = {sentence.pair.source: sentence for sentence in seed_sentences() if split == "test"}
    while len(found) < SIZES[split]:
        sentence = draw_sentence(rng)
        if split_of(sentence, validation, test) == split:
            found.setdefault(sentence.pair.source, sentence)
    return list(found.values())


def toy_pairs(split: Split) -> list[Pair]:
    """The sentence pairs of a split: 5,000 to train on, 300 for validation and 300 for test."""
    return [sentence.pair for sentence in toy_sentences(split)]
