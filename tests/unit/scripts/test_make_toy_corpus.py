"""The generator of the toy corpus: correct sentences, and splits that cannot be translated from memory."""

import re
from functools import cache
from pathlib import Path

import pytest
from make_toy_corpus import (
    NOUNS,
    POLARITIES,
    SUBJECTS,
    VERBS,
    Phrase,
    Polarity,
    Sentence,
    Triple,
    join,
    toy_sentences,
    write_clause,
    write_corpus,
    write_phrase,
)

from mtrain.data import Pair
from mtrain.data.reading.files import TOY_FOLDER, ToySplit, toy_pairs

sentences_of = cache(toy_sentences)
HELD_OUT: tuple[ToySplit, ...] = ("validation", "test")
SPLITS: tuple[ToySplit, ...] = ("train", *HELD_OUT)
SEEDS = [
    Pair("I like oranges.", "J'aime les oranges."),
    Pair("I don't like pineapples and oranges.", "Je n'aime pas les ananas et les oranges."),
]

BY_NAME = {subject[0]: subject for subject in SUBJECTS}
BY_VERB = {verb.english: verb for verb in VERBS}
BY_PHRASE = {
    write_phrase(phrase, VERBS[0], "+").source: phrase
    for noun in NOUNS
    for color in (None, *noun.colors)
    for phrase in (
        Phrase(noun, "", bool(noun.english[1]), color),
        Phrase(noun, "a", False, color),
        Phrase(noun, "the", False, color),
        Phrase(noun, "the", bool(noun.english[1]), color),
    )
}


def clause(subject: str, verb: str, *objects: str, polarity: Polarity = "+") -> Sentence:
    phrases = [BY_PHRASE[re.sub("^an ", "a ", phrase)] for phrase in objects]
    return write_clause(BY_NAME[subject], BY_VERB[verb], polarity, *phrases)


def words(text: str) -> set[str]:
    return set(re.findall(r"[\w'-]+|[.,?]", text))


def triples(split: ToySplit) -> set[Triple]:
    return {triple for sentence in sentences_of(split) for triple in sentence.triples}


# At least one line for each rule of the grammar, checked by hand.
CHECKED: list[tuple[list[Sentence], str, str]] = [
    # Conjugation.
    ([clause("you", "want", "cakes")], "You want cakes.", "Tu veux des gâteaux."),
    ([clause("he", "want", "cakes")], "He wants cakes.", "Il veut des gâteaux."),
    ([clause("we", "want", "cakes")], "We want cakes.", "Nous voulons des gâteaux."),
    ([clause("they", "want", "cakes")], "They want cakes.", "Ils veulent des gâteaux."),
    ([clause("we", "eat", "tomatoes")], "We eat tomatoes.", "Nous mangeons des tomates."),
    ([clause("we", "buy", "tomatoes")], "We buy tomatoes.", "Nous achetons des tomates."),
    (
        [clause("the children", "choose", "rice")],
        "The children choose rice.",
        "Les enfants choisissent du riz.",
    ),
    ([clause("my sister", "sell", "lemons")], "My sister sells lemons.", "Ma sœur vend des citrons."),
    # Elision of "je", "ne", "le", "la" and "de", and the aspirated h.
    ([clause("I", "buy", "pears")], "I buy pears.", "J'achète des poires."),
    (
        [clause("Paul", "buy", "pears", polarity="-")],
        "Paul doesn't buy pears.",
        "Paul n'achète pas de poires.",
    ),
    ([clause("she", "see", "the pineapple")], "She sees the pineapple.", "Elle voit l'ananas."),
    ([clause("she", "see", "the orange")], "She sees the orange.", "Elle voit l'orange."),
    ([clause("she", "see", "the oyster")], "She sees the oyster.", "Elle voit l'huître."),
    ([clause("she", "see", "the bean")], "She sees the bean.", "Elle voit le haricot."),
    (
        [clause("we", "see", "oysters", polarity="-")],
        "We don't see oysters.",
        "Nous ne voyons pas d'huîtres.",
    ),
    ([clause("we", "see", "beans", polarity="-")], "We don't see beans.", "Nous ne voyons pas de haricots."),
    # Articles: definite after a verb of liking, else indefinite or partitive, and "de" in a negation.
    ([clause("Paul", "love", "garlic")], "Paul loves garlic.", "Paul adore l'ail."),
    (
        [clause("Paul", "love", "garlic", polarity="-")],
        "Paul doesn't love garlic.",
        "Paul n'adore pas l'ail.",
    ),
    ([clause("Paul", "eat", "garlic")], "Paul eats garlic.", "Paul mange de l'ail."),
    ([clause("Paul", "eat", "garlic", polarity="-")], "Paul doesn't eat garlic.", "Paul ne mange pas d'ail."),
    ([clause("Paul", "eat", "bread")], "Paul eats bread.", "Paul mange du pain."),
    ([clause("Paul", "eat", "meat")], "Paul eats meat.", "Paul mange de la viande."),
    (
        [clause("Paul", "eat", "the bread", polarity="-")],
        "Paul doesn't eat the bread.",
        "Paul ne mange pas le pain.",
    ),
    ([clause("Paul", "eat", "the eggs")], "Paul eats the eggs.", "Paul mange les œufs."),
    ([clause("Paul", "eat", "an egg")], "Paul eats an egg.", "Paul mange un œuf."),
    ([clause("Paul", "eat", "an orange")], "Paul eats an orange.", "Paul mange une orange."),
    # Gender and number of the color.
    ([clause("Anne", "buy", "a green bean")], "Anne buys a green bean.", "Anne achète un haricot vert."),
    ([clause("Anne", "buy", "a green apple")], "Anne buys a green apple.", "Anne achète une pomme verte."),
    ([clause("Anne", "buy", "green apples")], "Anne buys green apples.", "Anne achète des pommes vertes."),
    ([clause("Anne", "buy", "white onions")], "Anne buys white onions.", "Anne achète des oignons blancs."),
    (
        [clause("Anne", "buy", "white peaches")],
        "Anne buys white peaches.",
        "Anne achète des pêches blanches.",
    ),
    (
        [clause("Anne", "buy", "red onions", polarity="-")],
        "Anne doesn't buy red onions.",
        "Anne n'achète pas d'oignons rouges.",
    ),
    ([clause("Anne", "hate", "the red apple")], "Anne hates the red apple.", "Anne déteste la pomme rouge."),
    # Questions.
    (
        [clause("you", "like", "oranges", polarity="?")],
        "Do you like oranges?",
        "Est-ce que tu aimes les oranges ?",
    ),
    (
        [clause("he", "like", "oranges", polarity="?")],
        "Does he like oranges?",
        "Est-ce qu'il aime les oranges ?",
    ),
    (
        [clause("Anne", "want", "a cherry", polarity="?")],
        "Does Anne want a cherry?",
        "Est-ce qu'Anne veut une cerise ?",
    ),
    ([clause("I", "buy", "eggs", polarity="?")], "Do I buy eggs?", "Est-ce que j'achète des œufs ?"),
    # Two objects, two clauses.
    ([clause("I", "eat", "bread", "apples")], "I eat bread and apples.", "Je mange du pain et des pommes."),
    (
        [clause("I", "eat", "bread", "apples", polarity="-")],
        "I don't eat bread or apples.",
        "Je ne mange pas de pain ni de pommes.",
    ),
    (
        [clause("they", "hate", "rice", "eggs", polarity="-")],
        "They don't hate rice and eggs.",
        "Ils ne détestent pas le riz et les œufs.",
    ),
    (
        [clause("I", "like", "cakes"), clause("he", "like", "meat", polarity="-")],
        "I like cakes, but he doesn't like meat.",
        "J'aime les gâteaux, mais il n'aime pas la viande.",
    ),
    (
        [clause("she", "sell", "bread", polarity="-"), clause("you", "sell", "rice")],
        "She doesn't sell bread, but you sell rice.",
        "Elle ne vend pas de pain, mais tu vends du riz.",
    ),
]


@pytest.mark.parametrize(("clauses", "english", "french"), CHECKED)
def test_the_grammar_writes_correct_sentences(clauses: list[Sentence], english: str, french: str) -> None:
    assert join(*clauses).pair == Pair(english, french)


def test_the_seed_sentences_are_in_test_and_not_in_train() -> None:
    assert toy_pairs("test")[:2] == SEEDS
    assert not set(SEEDS) & set(toy_pairs("train"))


def test_sizes() -> None:
    assert {split: len(sentences_of(split)) for split in SPLITS} == {
        "train": 5000,
        "validation": 300,
        "test": 300,
    }


def test_the_bundled_files_are_what_the_generator_writes(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    for split in SPLITS:
        assert (tmp_path / f"{split}.tsv").read_bytes() == (TOY_FOLDER / f"{split}.tsv").read_bytes()


def test_a_source_occurs_once_so_it_has_one_target() -> None:
    sources = [sentence.pair.source for split in SPLITS for sentence in sentences_of(split)]
    assert len(set(sources)) == len(sources)


@pytest.mark.parametrize("pair", [("train", "validation"), ("train", "test"), ("validation", "test")])
def test_splits_share_no_source_and_no_target(pair: tuple[ToySplit, ToySplit]) -> None:
    one, other = toy_pairs(pair[0]), toy_pairs(pair[1])
    assert {p.source for p in one}.isdisjoint(p.source for p in other)
    assert {p.target for p in one}.isdisjoint(p.target for p in other)


@pytest.mark.parametrize("split", HELD_OUT)
def test_each_held_out_sentence_holds_a_triple_that_training_lacks(split: ToySplit) -> None:
    trained = triples("train")
    assert all(set(sentence.triples) - trained for sentence in sentences_of(split))


def test_validation_and_test_hold_out_different_triples() -> None:
    trained = triples("train")
    assert not (triples("validation") - trained) & (triples("test") - trained)


def test_every_verb_and_noun_keeps_most_of_its_triples_in_training() -> None:
    possible = {
        (verb.english, noun.english[0], polarity)
        for verb in VERBS
        for noun in NOUNS
        for polarity in POLARITIES
    }
    trained = triples("train")
    assert trained < possible
    assert len(trained) > 0.9 * len(possible)
    for name in [verb.english for verb in VERBS] + [noun.english[0] for noun in NOUNS]:
        mine = {triple for triple in possible if name in triple}
        assert len(mine & trained) > 0.8 * len(mine), name


@pytest.mark.parametrize("split", HELD_OUT)
def test_training_has_every_word_of_the_held_out_sentences(split: ToySplit) -> None:
    for side in (0, 1):
        trained = {word for pair in toy_pairs("train") for word in words(pair[side])}
        assert not {word for pair in toy_pairs(split) for word in words(pair[side])} - trained


@pytest.mark.parametrize("split", SPLITS)
def test_spacing_punctuation_and_french_contractions(split: ToySplit) -> None:
    for source, target in toy_pairs(split):
        assert re.fullmatch(r"[A-Z][A-Za-z']*( [A-Za-z']+,?)* [A-Za-z]+[.?]", source)
        assert re.fullmatch(r"[A-Z][^.?]*[^.? ](\.| \?)", target)
        assert "  " not in target
        assert not re.search(r"\bde les? |\b(je|ne|de|le|la|que) [aeiouéèœ]", target.lower())
