"""A toy corpus: a small grammar that writes English sentences and their French translations.

There is nothing to download, and a small model learns it in minutes. Yet the validation and test splits ask
for more than memory. A sentence is described by its triples (verb, noun, polarity): "I don't like pineapples
and oranges." holds (like, pineapple, -) and (like, orange, -). A tenth of the triples is held out, and no
sentence with one of them is in training. So a model has seen each word of a test sentence, but some verb of
it never with that noun in that polarity: "+" for a statement, "-" for a negated one and "?" for a question.
"""

import random
import re
from typing import Literal, NamedTuple

from mtrain.data import Pair

Split = Literal["train", "validation", "test"]
Polarity = Literal["+", "-", "?"]
Triple = tuple[str, str, Polarity]  # verb, noun, polarity

SEED = 7765  # one with which the held-out triples spread evenly: one to four for each noun
SIZES: dict[Split, int] = {"train": 5000, "validation": 300, "test": 300}
POLARITIES: tuple[Polarity, ...] = ("+", "-", "?")


class Verb(NamedTuple):
    english: str
    french: list[str]  # with je, tu, il or elle, nous, ils
    feeling: bool  # French likes "les oranges", with the article, where it eats "des oranges"


class Noun(NamedTuple):
    english: list[str]  # singular and plural; no plural for what is not counted, such as bread
    french: list[str]
    gender: str  # "m" or "f"
    colours: list[str]


class Phrase(NamedTuple):
    noun: Noun
    determiner: str  # "a", "the" or nothing
    plural: bool
    colour: str | None


class Sentence(NamedTuple):
    pair: Pair
    triples: list[Triple]


def entries(lexicon: str) -> list[list[str]]:
    """The fields of each entry; semicolons lie between entries, two spaces between fields."""
    return [re.split("  +", entry.strip()) for entry in lexicon.split(";")]


# "You" is always the familiar "tu", and "they" is always "ils", so that a source has one translation.
# The number says which form of a verb follows.
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
    Noun([*english.split(), ""][:2], [*french.split(), ""][:2], gender, colours)
    for english, french, gender, *colours in entries("""
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
# As dictionaries write them: the feminine of "vert/e" is "verte".
COLOURS = {"red": "rouge", "green": "vert/e", "yellow": "jaune", "black": "noir/e", "white": "blanc/he"}
ARTICLES = {"m": ("le", "un", "de le"), "f": ("la", "une", "de la"), "plural": ("les", "", "des")}
AN = re.compile(r"\ba (?=[aeiou])")
# "Je", "ne", "de", "le", "la", "que" drop their vowel before a vowel or a mute h (that of "haricot" is not).
ELISION = re.compile(r"\b(j|n|d|l|qu)[ea] (?=[aàâeéèêiîoôœu]|h(?!aricot))", re.IGNORECASE)


def write_phrase(phrase: Phrase, verb: Verb, polarity: Polarity) -> Pair:
    noun, determiner, plural, colour = phrase
    english, french = noun.english[plural], noun.french[plural]
    if colour:
        masculine, ending = COLOURS[colour].partition("/")[::2]
        english = f"{colour} {english}"
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
    """Write out a clause, still without its capital letter and its full stop."""
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
    # Elision comes first: "de le ail" becomes "de l'ail", and only the "de le" that remain become "du".
    pair = Pair(AN.sub("an ", source), ELISION.sub(r"\1'", target).replace(" de le ", " du "))
    return Sentence(pair, [(verb.english, phrase.noun.english[0], polarity) for phrase in objects])


def join(*clauses: Sentence) -> Sentence:
    """Make a sentence of one clause, or of two with "but" between them."""
    source = ", but ".join(clause.pair.source for clause in clauses)
    target = ", mais ".join(clause.pair.target for clause in clauses)
    triples = [triple for clause in clauses for triple in clause.triples]
    ends = ("?", " ?") if triples[0][2] == "?" else (".", ".")  # French has a space before "?"
    pair = Pair(source[0].upper() + source[1:] + ends[0], target[0].upper() + target[1:] + ends[1])
    return Sentence(pair, triples)


def draw_phrase(rng: random.Random, noun: Noun, *determiners: str) -> Phrase:
    """The noun with one of the determiners, at times with a colour, in the plural wherever it can be."""
    determiner = rng.choice(determiners)
    singular = not noun.english[1] or determiner == "a" or (determiner == "the" and rng.random() < 0.5)
    colour = rng.choice(noun.colours) if noun.colours and rng.random() < 0.3 else None
    return Phrase(noun, determiner, not singular, colour)


def draw_sentence(rng: random.Random) -> Sentence:
    """Draw one sentence: mostly a clause with one object or with two, sometimes two clauses and a "but"."""
    subject, verb, polarity = rng.choice(SUBJECTS), rng.choice(VERBS), rng.choice(POLARITIES)
    one, two = rng.sample(NOUNS, 2)
    shape = rng.choices(("one object", "two objects", "but"), weights=(5, 3, 2))[0]
    if shape == "one object":
        # "I like an orange" and "I don't eat an orange" can be said, but hardly ever are.
        a = "" if verb.feeling or polarity == "-" or not one.english[1] else "a"
        return join(write_clause(subject, verb, polarity, draw_phrase(rng, one, "", "", "the", a)))
    first, second = draw_phrase(rng, one, ""), draw_phrase(rng, two, "")
    if shape == "two objects":
        return join(write_clause(subject, verb, polarity, first, second))
    before, after = rng.sample(POLARITIES[:2], 2)
    other = rng.choice(SUBJECTS[:6])  # a pronoun: "Paul likes pears, but Paul doesn't like eggs." is clumsy
    return join(write_clause(subject, verb, before, first), write_clause(other, verb, after, second))


# The corpus grew from these two. They open the test split, and training has none of their triples.
ORANGES, PINEAPPLES = (Phrase(noun, "", True, None) for noun in NOUNS[:2])
SEEDS = (
    join(write_clause(SUBJECTS[0], VERBS[0], "+", ORANGES)),
    join(write_clause(SUBJECTS[0], VERBS[0], "-", PINEAPPLES, ORANGES)),
)


def held_out(rng: random.Random) -> dict[Triple, Split]:
    """The triples that only validation may hold, and those that only test may hold: 5 % of all for each."""
    seeds = [triple for sentence in SEEDS for triple in sentence.triples]
    triples = [(verb.english, noun.english[0], p) for verb in VERBS for noun in NOUNS for p in POLARITIES]
    drawn = seeds + rng.sample([triple for triple in triples if triple not in seeds], 45)
    return {triple: "test" if i < 24 else "validation" for i, triple in enumerate(drawn)}


def toy_sentences(split: Split) -> list[Sentence]:
    """The sentences of a split with their triples: the same, in the same order, at every call."""
    rng = random.Random(SEED)
    held = held_out(rng)
    wanted = set() if split == "train" else {split}  # what is held out for both others is in no split
    found = {sentence.pair.source: sentence for sentence in SEEDS if split == "test"}
    while len(found) < SIZES[split]:
        sentence = draw_sentence(rng)
        if {held[triple] for triple in sentence.triples if triple in held} == wanted:
            found.setdefault(sentence.pair.source, sentence)
    return list(found.values())


def toy_pairs(split: Split) -> list[Pair]:
    """The sentence pairs of a split: 5,000 to train on, 300 for validation and 300 for test."""
    return [sentence.pair for sentence in toy_sentences(split)]
