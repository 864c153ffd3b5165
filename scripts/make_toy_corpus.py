"""Generates the bundled toy corpus: English sentences of a small grammar and their French translations.

    python scripts/make_toy_corpus.py [FOLDER]

It writes train.tsv, validation.tsv and test.tsv, by default into mtrain/data/toy.

A small model learns the corpus in minutes, but the validation and test splits cannot be translated from
memory. A sentence is described by its triples (verb, noun, polarity): "I don't like pineapples and oranges."
contains (like, pineapple, -) and (like, orange, -). A tenth of the triples is held out: no training sentence
contains one. A model has therefore seen every word of a test sentence, but some verb never with that noun in
that polarity: "+" for a statement, "-" for a negated statement and "?" for a question.
"""

import random
import re
import sys
from pathlib import Path
from typing import Literal, NamedTuple

from mtrain.data import Pair
from mtrain.data.reading.files import TOY_FOLDER, ToySplit

Polarity = Literal["+", "-", "?"]
Triple = tuple[str, str, Polarity]  # verb, noun, polarity

SEED = 7765  # spreads the held-out triples evenly: one to four for each noun
SIZES: dict[ToySplit, int] = {"train": 5000, "validation": 300, "test": 300}
POLARITIES: tuple[Polarity, ...] = ("+", "-", "?")


class Verb(NamedTuple):
    english: str
    french: list[str]  # with je, tu, il or elle, nous, ils
    feeling: bool  # takes the definite article: "j'aime les oranges", but "je mange des oranges"


class Noun(NamedTuple):
    english: list[str]  # singular and plural; the plural is empty for uncountable nouns such as "bread"
    french: list[str]
    gender: str  # "m" or "f"
    colors: list[str]


class Phrase(NamedTuple):
    noun: Noun
    determiner: str  # "a", "the" or nothing
    plural: bool
    color: str | None


class Sentence(NamedTuple):
    pair: Pair
    triples: list[Triple]


def entries(lexicon: str) -> list[list[str]]:
    """The fields of each entry. Semicolons separate entries, two or more spaces separate fields."""
    return [re.split("  +", entry.strip()) for entry in lexicon.split(";")]


# "You" is always the familiar "tu" and "they" is always "ils", so that each source has one translation.
# The number is the index of the verb form.
SUBJECTS = [
    (english, french, int(person))
    for english, french, person in entries("""
        I  je  0;     you  tu  1;      he  il  2;      she  elle  2;          we  nous  3;
        they  ils  4; Paul  Paul  2;   Anne  Anne  2;  my sister  ma sœur  2; the children  les enfants  4
    """)
]
VERBS = [
    Verb(english, french.split(), english in ("like", "love", "hate"))
    for english, french in entries("""
        like  aime aimes aime aimons aiment;       love  adore adores adore adorons adorent;
        hate  déteste détestes déteste détestons détestent;
        eat  mange manges mange mangeons mangent;  buy  achète achètes achète achetons achètent;
        sell  vends vends vend vendons vendent;    want  veux veux veut voulons veulent;
        see  vois vois voit voyons voient;         choose  choisis choisis choisit choisissons choisissent
    """)
]
NOUNS = [
    Noun([*english.split(), ""][:2], [*french.split(), ""][:2], gender, colors)
    for english, french, gender, *colors in entries("""
        orange oranges  orange oranges  f;              pineapple pineapples  ananas ananas  m;
        apple apples  pomme pommes  f  red  green;      pear pears  poire poires  f  green  yellow;
        peach peaches  pêche pêches  f  yellow  white;  cherry cherries  cerise cerises  f  red  black;
        lemon lemons  citron citrons  m  yellow;        olive olives  olive olives  f  green  black;
        tomato tomatoes  tomate tomates  f  red  green; onion onions  oignon oignons  m  red  yellow  white;
        bean beans  haricot haricots  m  red  green  white;  egg eggs  œuf œufs  m;
        oyster oysters  huître huîtres  f;              cake cakes  gâteau gâteaux  m;
        bread  pain  m  white  black;                   rice  riz  m  white  red;
        meat  viande  f  red  white;                    garlic  ail  m
    """)
]
# In dictionary notation: the feminine of "vert/e" is "verte".
COLORS = {"red": "rouge", "green": "vert/e", "yellow": "jaune", "black": "noir/e", "white": "blanc/he"}
ARTICLES = {"m": ("le", "un", "de le"), "f": ("la", "une", "de la"), "plural": ("les", "", "des")}
AN = re.compile(r"\ba (?=[aeiou])")
# "Je", "ne", "de", "le", "la", "que" drop their vowel before a vowel or a mute h (but not that of "haricot").
ELISION = re.compile(r"\b(j|n|d|l|qu)[ea] (?=[aàâeéèêiîoôœu]|h(?!aricot))", re.IGNORECASE)


def write_phrase(phrase: Phrase, verb: Verb, polarity: Polarity) -> Pair:
    noun, determiner, plural, color = phrase
    english, french = noun.english[plural], noun.french[plural]
    if color:
        masculine, ending = COLORS[color].partition("/")[::2]
        english = f"{color} {english}"
        french += f" {masculine}{ending if noun.gender == 'f' else ''}{'s' if plural else ''}"
    the, a, some = ARTICLES["plural" if plural else noun.gender]
    if determiner == "the" or verb.feeling:
        article = the
    elif polarity == "-":
        article = "de"
    else:
        article = a if determiner == "a" else some
    return Pair(f"{determiner} {english}".strip(), f"{article} {french}")


def write_clause(subject: tuple[str, str, int], verb: Verb, polarity: Polarity, *objects: Phrase) -> Sentence:
    """Write a clause, without capital letter and final punctuation."""
    english, french, person = subject
    do, ending = ("does", "s") if person == 2 else ("do", "")
    if polarity == "?":
        source, target = f"{do} {english} {verb.english}", f"est-ce que {french} {verb.french[person]}"
    elif polarity == "-":
        source, target = f"{english} {do}n't {verb.english}", f"{french} ne {verb.french[person]} pas"
    else:
        source, target = f"{english} {verb.english}{ending}", f"{french} {verb.french[person]}"
    # "I don't eat bread or apples": French does not say "pas de pain et de pommes".
    joints = (" or ", " ni ") if polarity == "-" and not verb.feeling else (" and ", " et ")
    written = [write_phrase(phrase, verb, polarity) for phrase in objects]
    source += " " + joints[0].join(phrase.source for phrase in written)
    target += " " + joints[1].join(phrase.target for phrase in written)
    # Elision comes first: "de le ail" becomes "de l'ail", and only the remaining "de le" become "du".
    pair = Pair(AN.sub("an ", source), ELISION.sub(r"\1'", target).replace(" de le ", " du "))
    return Sentence(pair, [(verb.english, phrase.noun.english[0], polarity) for phrase in objects])


def join(*clauses: Sentence) -> Sentence:
    """Make a sentence from one clause, or from two joined by "but"."""
    source = ", but ".join(clause.pair.source for clause in clauses)
    target = ", mais ".join(clause.pair.target for clause in clauses)
    triples = [triple for clause in clauses for triple in clause.triples]
    ends = ("?", " ?") if triples[0][2] == "?" else (".", ".")  # French puts a space before "?"
    pair = Pair(source[0].upper() + source[1:] + ends[0], target[0].upper() + target[1:] + ends[1])
    return Sentence(pair, triples)


def draw_phrase(rng: random.Random, noun: Noun, *determiners: str) -> Phrase:
    """Draw a phrase of the noun: one of the determiners, sometimes a color, plural where possible."""
    determiner = rng.choice(determiners)
    singular = not noun.english[1] or determiner == "a" or (determiner == "the" and rng.random() < 0.5)
    color = rng.choice(noun.colors) if noun.colors and rng.random() < 0.3 else None
    return Phrase(noun, determiner, not singular, color)


def draw_sentence(rng: random.Random) -> Sentence:
    """Draw a sentence: mostly a clause with one or two objects, sometimes two clauses joined by "but"."""
    subject, verb, polarity = rng.choice(SUBJECTS), rng.choice(VERBS), rng.choice(POLARITIES)
    one, two = rng.sample(NOUNS, 2)
    shape = rng.choices(("one object", "two objects", "but"), weights=(5, 3, 2))[0]
    if shape == "one object":
        # "I like an orange" and "I don't eat an orange" are grammatical but unusual.
        a = "" if verb.feeling or polarity == "-" or not one.english[1] else "a"
        return join(write_clause(subject, verb, polarity, draw_phrase(rng, one, "", "", "the", a)))
    first, second = draw_phrase(rng, one, ""), draw_phrase(rng, two, "")
    if shape == "two objects":
        return join(write_clause(subject, verb, polarity, first, second))
    before, after = rng.sample(POLARITIES[:2], 2)
    other = rng.choice(SUBJECTS[:6])  # a pronoun, to avoid "Paul likes pears, but Paul doesn't like eggs."
    return join(write_clause(subject, verb, before, first), write_clause(other, verb, after, second))


# The first two sentences of the test split. Training contains none of their triples.
ORANGES, PINEAPPLES = (Phrase(noun, "", True, None) for noun in NOUNS[:2])
SEEDS = (
    join(write_clause(SUBJECTS[0], VERBS[0], "+", ORANGES)),
    join(write_clause(SUBJECTS[0], VERBS[0], "-", PINEAPPLES, ORANGES)),
)


def held_out(rng: random.Random) -> dict[Triple, ToySplit]:
    """The triples reserved for validation and for test: 5% of all triples each."""
    seeds = [triple for sentence in SEEDS for triple in sentence.triples]
    triples = [(verb.english, noun.english[0], p) for verb in VERBS for noun in NOUNS for p in POLARITIES]
    drawn = seeds + rng.sample([triple for triple in triples if triple not in seeds], 45)
    return {triple: "test" if i < 24 else "validation" for i, triple in enumerate(drawn)}


def toy_sentences(split: ToySplit) -> list[Sentence]:
    """The sentences of a split with their triples, in a fixed order."""
    rng = random.Random(SEED)
    held = held_out(rng)
    wanted = set() if split == "train" else {split}
    found = {sentence.pair.source: sentence for sentence in SEEDS if split == "test"}
    while len(found) < SIZES[split]:
        sentence = draw_sentence(rng)
        if {held[triple] for triple in sentence.triples if triple in held} == wanted:
            found.setdefault(sentence.pair.source, sentence)
    return list(found.values())


def write_corpus(folder: Path) -> None:
    """Write the three splits as tab-separated files."""
    folder.mkdir(parents=True, exist_ok=True)
    for split in SIZES:
        lines = ("\t".join(sentence.pair) + "\n" for sentence in toy_sentences(split))
        (folder / f"{split}.tsv").write_text("".join(lines), encoding="utf-8", newline="")


if __name__ == "__main__":
    write_corpus(Path(sys.argv[1]) if len(sys.argv) > 1 else TOY_FOLDER)
