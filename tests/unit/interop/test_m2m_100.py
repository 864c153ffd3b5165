"""M2M-100 and NLLB-200 models that Transformers made and saved: mtrain says what Transformers says."""

import json
import math
import random
import re
import shutil
import subprocess
import sys
import unicodedata
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from mtrain.checkpoint.model_folder import LoadedModel, load_model
from mtrain.checkpoint.model_info import read_info
from mtrain.config.load import validate
from mtrain.config.schema import Config
from mtrain.config.sections.augment import Augment
from mtrain.data.rewriting.augment_pairs import PairAugmenter
from mtrain.decoding.batches import padded
from mtrain.decoding.scoring.score import score_pairs
from mtrain.decoding.search.search import search
from mtrain.decoding.translate import Translator
from mtrain.errors import ModelError, UsageError
from mtrain.interop.export import export_model
from mtrain.interop.import_model import import_model
from mtrain.interop.m2m_100_tokenizer import take_tokenizer, write_languages
from mtrain.interop.verify import open_ctranslate2, open_transformers, sentences_of, verify
from mtrain.model.transformer import Transformer
from mtrain.tokenizer.tokenizer import Tokenizer
from mtrain.training.fit import fit
from mtrain.training.setup.prepare_run import prepare_only
from tests.support import m2m_100
from tests.support.cli import one_line
from tests.support.encoding import config, prepare_data, rows, write
from tests.support.m2m_100 import CODES, PAIRS, make, train, write_m2m_tokenizer, write_nllb_tokenizer
from tests.support.marian import transformers

if TYPE_CHECKING:
    from transformers import M2M100ForConditionalGeneration

TEXTS = [pair.source for pair in PAIRS[:40]]
SHAPES: dict[str, dict[str, Any]] = {
    "m2m": {"d_model": 24, "encoder_layers": 1, "decoder_layers": 3},
    "nllb-old": {"shards": 3, "encoder_ffn_dim": 40, "decoder_ffn_dim": 40, "activation_function": "gelu"},
    "nllb-new": {"shards": 3, "decoder_layers": 1, "tie_word_embeddings": True},
}


class Made(NamedTuple):
    """A model of Transformers, its folder and the folder of the imported model."""

    theirs: Any  # an M2M100ForConditionalGeneration
    folder: Path
    imported: Path

    def tokenizer(self, **options: Any) -> Any:
        kind = "M2M100Tokenizer" if (self.folder / "vocab.json").exists() else "NllbTokenizer"
        return getattr(transformers(), kind).from_pretrained(self.folder, **options)

    def languages(self) -> tuple[str, str]:
        return ("en", "fr") if (self.folder / "vocab.json").exists() else ("eng_Latn", "fra_Latn")


def write_tokenizer(folder: Path, kind: str) -> int:
    return write_m2m_tokenizer(folder) if kind == "m2m" else write_nllb_tokenizer(folder, kind == "nllb-new")


def import_without_normalization(folder: Path, out: Path) -> Path:
    import_model(str(folder), out, ["normalizes_punctuation=false"])
    return out


@pytest.fixture(scope="module", params=SHAPES)
def made(request, tmp_path_factory) -> Made:
    folder = tmp_path_factory.mktemp("m2m") / request.param
    theirs = make(folder, write_tokenizer(folder, request.param), **SHAPES[request.param])
    return Made(theirs, folder, import_without_normalization(folder, folder.with_name("imported")))


@pytest.fixture(scope="module")
def originals(tmp_path_factory) -> dict[bool, Path]:
    """The folders of an NLLB model as Transformers 4 saved it, and as Transformers 5 saves it."""
    folders = {new: tmp_path_factory.mktemp("nllb") / "nllb" for new in (False, True)}
    for new, folder in folders.items():
        make(folder, write_nllb_tokenizer(folder, new))
    return folders


@pytest.fixture
def nllb(originals, tmp_path) -> Path:
    """A copy of the first one that a test may change."""
    return Path(shutil.copytree(originals[False], tmp_path / "nllb"))


@pytest.fixture
def new_nllb(originals, tmp_path) -> Path:
    """A copy of the second one that a test may change."""
    return Path(shutil.copytree(originals[True], tmp_path / "nllb"))


def edit(file: Path, **changes: Any) -> None:
    """Change keys of a JSON file; None removes one."""
    values = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


def exact_positions(model: "M2M100ForConditionalGeneration") -> None:
    """Replace the table of positions by one that is computed in fp64, from the formula of fairseq."""
    width = model.config.d_model
    frequencies = [math.exp(-i * math.log(10000) / (width // 2 - 1)) for i in range(width // 2)]
    rows = [[[f(p * x) for x in frequencies] for f in (math.sin, math.cos)] for p in range(66)]
    table = torch.tensor(rows, dtype=torch.float64).flatten(1)
    table[1] = 0  # the row of <pad>
    for side in (model.model.encoder, model.model.decoder):
        side.embed_positions.weights = table


def logits_of(model: Transformer, source: torch.Tensor, keep: torch.Tensor, target: torch.Tensor) -> Any:
    return model.project(model.decode(target, model.encode(source, keep), keep))


@torch.inference_mode()
def largest_difference(theirs: Any, ours: Transformer) -> float:
    """Of the logits for random ids with padding."""
    torch.manual_seed(3)
    source, target = torch.randint(4, 300, (5, 40)), torch.randint(4, 300, (5, 30))
    lengths = torch.tensor([40, 1, 33, 7, 20])
    keep = torch.arange(40) < lengths[:, None]
    source[~keep], target[:, 0] = 1, 2
    expected = theirs(source, attention_mask=keep.long(), decoder_input_ids=target).logits
    assert expected.std() > 0.5
    return float((logits_of(ours, source, keep, target) - expected).abs().max())


def test_logits_equal_those_of_transformers(made):
    ours = load_model(made.imported).model
    assert largest_difference(made.theirs, ours) < 1e-5
    theirs = transformers().M2M100ForConditionalGeneration(made.theirs.config).double().eval()
    theirs.load_state_dict(made.theirs.double().state_dict())
    made.theirs.float()
    exact_positions(theirs)
    ours = ours.double()
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    ours.embed.make_positions()
    torch.set_default_dtype(default)
    assert largest_difference(theirs, ours) < 1e-10


def encode(made: Made, tokenizer: Any, texts: list[str]) -> list[list[int]]:
    tokenizer.src_lang, _ = made.languages()
    return [tokenizer(text).input_ids for text in texts]


def test_sources_are_encoded_as_by_transformers(made):
    with Translator.load(made.imported, "cpu").between(*made.languages()) as translator:
        assert translator.splitter.encode(TEXTS) == encode(made, made.tokenizer(), TEXTS)
        ids = translator.tokenizer.encode_target(TEXTS[:3])
        assert translator.tokenizer.decode(ids) == TEXTS[:3]


def generated(made: Made, loaded: LoadedModel, texts: list[str], beams: int) -> list[list[int]]:
    """The ids of translations by `generate`, without special tokens."""
    tokenizer, codes = made.tokenizer(), loaded.tokenizer.source.codes
    source, target = made.languages()
    tokenizer.src_lang = source
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    forbidden = [[i] for i in loaded.config.decoding.forbidden_ids]
    options = {"forced_bos_token_id": codes[target], "bad_words_ids": forbidden, "num_beams": beams}
    rows = made.theirs.generate(**batch, **options).tolist()
    return [[i for i in row if i not in (1, 2, *codes.values())] for row in rows]


def translated(made: Made, texts: list[str], beams: int) -> list[list[int]]:
    """The same by mtrain."""
    with Translator.load(made.imported, "cpu", [f"decoding.beam_size={beams}"], workers=1) as translator:
        chosen = translator.between(*made.languages())
        rows = search_of(chosen, chosen.splitter.parts_of(texts, [], 0))
        codes = chosen.tokenizer.source.codes.values()
        return [[i for i in row if i not in (1, 2, *codes)] for row in rows]


def search_of(translator: Translator, parts: Any) -> list[list[int]]:
    found: list[list[int]] = []
    for start in range(0, len(parts), 50):
        some = parts[start : start + 50]
        source, keep = padded([part.source for part in some], 1, translator.device)
        prefixes = [part.prefix for part in some]
        best = search(translator.models, source, keep, translator.decoding, prefixes)
        found += [hypotheses[0].ids for hypotheses in best]
    return found


def test_greedy_translations_equal_those_of_generate(made):
    loaded = load_model(made.imported)
    assert loaded.config.decoding.max_length_offset == m2m_100.MAX_LENGTH - 2
    texts = TEXTS[:4]
    assert translated(made, texts, 1) == generated(made, loaded, texts, 1)
    with Translator.load(made.imported, "cpu", workers=1).between(*made.languages()) as translator:
        texts_of_ids = loaded.tokenizer.decode(generated(made, loaded, texts, 1))
        assert [one.text for one in translator.translate(texts)] == texts_of_ids
        long, limit = " ".join(texts), m2m_100.MAX_LENGTH - 2
        parts = translator.splitter.parts_of([long], [], 0)
        assert len(parts) > 1 and max(len(part.source) for part in parts) <= limit < loaded.config.max_length


@pytest.mark.slow
@pytest.mark.parametrize("kind", SHAPES)
def test_a_trained_model_translates_like_transformers(kind, tmp_path):
    """Trained for a moment, so that translations differ and end."""
    folder = tmp_path / kind
    shape = {**SHAPES[kind], "d_model": 48, "max_position_embeddings": 128}
    theirs = make(folder, write_tokenizer(folder, kind), **shape)
    import_without_normalization(folder, tmp_path / "untrained")
    shards = shape.get("shards", 1)
    train(theirs, Translator.load(tmp_path / "untrained", "cpu"), folder, shards)
    made = Made(theirs, folder, import_without_normalization(folder, tmp_path / "trained"))
    loaded = load_model(made.imported)
    texts = [pair.source for pair in (PAIRS * 1000)[:1000]]
    assert largest_difference(theirs, loaded.model) < 1e-5
    for beams, most in ((1, 0), (4, 1)):
        expected = [
            row for i in range(0, 1000, 50) for row in generated(made, loaded, texts[i : i + 50], beams)
        ]
        found = translated(made, texts, beams)
        assert len({tuple(row) for row in found}) > 100
        assert sum(a != b for a, b in zip(found, expected, strict=True)) <= most


def test_targets_are_scored_without_their_code(made):
    loaded, (_, target) = load_model(made.imported), made.languages()
    with Translator.load(made.imported, "cpu").between(*made.languages()) as translator:
        [scored] = score_pairs(translator, [(TEXTS[0], TEXTS[1])])
        source = torch.tensor(encode(made, made.tokenizer(), TEXTS[:1]))
        code = loaded.tokenizer.source.codes[target]
        labels = torch.tensor([[code, *loaded.tokenizer.encode_target([TEXTS[1]])[0], 2]])
        with torch.inference_mode():
            logits = made.theirs(input_ids=source, labels=labels).logits
        expected = logits.log_softmax(-1)[0, torch.arange(labels.size(1)), labels[0]][1:]
        assert scored.token_log_probs == pytest.approx(expected.tolist(), abs=1e-5)
        assert len(scored.tokens) == len(expected)
        [aligned] = translator.translate(TEXTS[:1], alignments=True)
        words = len(TEXTS[0].split()), len(aligned.text.split())
        assert aligned.alignment is not None
        assert all(i < words[0] and j < words[1] for i, j in aligned.alignment)


# ------------------------------------------------------------------------------------------------ tokenizers

SCRIPTS = """
    0041-024F 0370-03FF 0400-052F 0531-058A 0591-05F4 0600-06FF 0700-074F 0780-07B1 07C0-07FA
    0900-097F 0980-09FE 0A01-0A76 0A81-0AFF 0B01-0B77 0B82-0BFA 0C00-0C7F 0C80-0CF2 0D00-0D7F
    0D82-0DF4 0E01-0E5B 0E81-0EDF 0F00-0FD4 1000-109F 10A0-10FF 1100-11FF 1200-137F 13A0-13FD
    1780-17F9 1820-18AA 2D30-2D7F 3041-30FF 4E00-4EFF AC00-D7A3 FF01-FFEE 1F300-1F64F 0020-007E
"""
ODDITIES = [
    "", "a  b", "\u2581a", "a\u2581\u2581b", "\tx\ty", "a\u3000b", "e\u0301", "\ufb01", "a\u200bb",
    "I\u0307", "......", "aaaaaaaaaaaaa", "\u00f6" * 5, "\U0001f468\u200d\U0001f469", "a" * 300,
    "x\x01\x02y", "\u00bd", "\u337f", "\ufdfa", "A\u030a", "x\ufe0f", "\u0958", ">>fra<< a", "<2fr> a",
    "eng Latn",
]  # fmt: skip


def lines_of_scripts(count: int, normalized: bool) -> list[str]:
    """Random lines, each of one script and some ASCII."""
    generator = random.Random(7)
    ranges = [[int(end, 16) for end in script.split("-")] for script in SCRIPTS.split()]
    lines = []
    while len(lines) < count:
        first, last = generator.choice(ranges)
        words = []
        for _ in range(generator.randint(1, 10)):
            among = (first, last) if generator.random() < 0.85 else (0x21, 0x7E)
            word = [chr(generator.randint(*among)) for _ in range(generator.randint(1, 7))]
            words.append("".join(c for c in word if unicodedata.category(c) not in ("Cn", "Cs", "Cf")))
        line = " ".join(words)
        lines.append(unicodedata.normalize("NFKC", line).strip() if normalized else line)
    return lines


@pytest.mark.slow
@pytest.mark.parametrize("kind", SHAPES)
def test_lines_of_all_scripts_are_segmented_as_by_transformers(kind, tmp_path, monkeypatch):
    """Of NllbTokenizer, lines are compared that its normalizer does not change: it treats clusters of
    characters in another way than SentencePiece, whose normalizer M2M100Tokenizer and mtrain use."""
    lines = lines_of_scripts(5000, normalized=kind != "m2m")
    spm = m2m_100.learn([*lines[:3000], *TEXTS], 12_000)
    monkeypatch.setattr(m2m_100, "spm", lambda: spm)
    folder, out = tmp_path / "in", tmp_path / "out"
    imported = take_tokenizer(folder, out, write_tokenizer(folder, kind))
    write_languages(out, imported.tokenizer.source.codes, False)
    theirs = Made(None, folder, out).tokenizer()
    for texts in (lines, ODDITIES):
        expected = [theirs(text, add_special_tokens=False).input_ids for text in texts]
        assert Tokenizer(out).encode_source(texts) == expected


def test_sentencepiece_decides_where_transformers_differs(made):
    """Names of special tokens in a text are text, and spaces at its end are ignored."""
    vocabulary = load_model(made.imported).tokenizer.source
    names = [vocabulary.pieces[vocabulary.codes[code]] for code in made.languages()]
    for text in ("</s>", "<pad>", "<mask>", *names):
        assert ["".join(pieces) for pieces in vocabulary.segment([text])] == [f"\u2581{text}"]
        assert not {0, 1, 2, *vocabulary.codes.values()} & {*vocabulary.encode([text])[0]}
    assert vocabulary.encode([f"{TEXTS[0]} "]) == vocabulary.encode(TEXTS[:1])


@pytest.mark.parametrize("legacy", [True, False])
def test_the_code_of_the_source_is_where_transformers_has_it(nllb, tmp_path, legacy):
    edit(nllb / "tokenizer_config.json", legacy_behaviour=legacy)
    made = Made(None, nllb, import_without_normalization(nllb, tmp_path / "out"))
    with Translator.load(made.imported, "cpu").between("en", "fr") as translator:
        found = translator.splitter.encode(TEXTS[:3])
        assert found == encode(made, made.tokenizer(), TEXTS[:3])
        assert (found[0][-1] == CODES.index("eng_Latn") + 301) is legacy
        [part, *_] = translator.splitter.parts_of(TEXTS[:1], ["x"], 0)
        assert part.source == found[0] and part.prefix[0] == CODES.index("fra_Latn") + 301
        assert translator.translate(TEXTS[:1], alignments=True, prefixes=["x"])[0].text.startswith("x")


def test_ids_without_text_are_never_generated(made):
    loaded = load_model(made.imported)
    unused = range(len(loaded.tokenizer.source) - (8 if made.languages()[0] == "en" else 2), 500)
    size = loaded.config.model.target_vocab_size
    assert loaded.config.decoding.forbidden_ids == [i for i in unused if i < size]


# ---------------------------------------------------------------------------------- languages, normalization


def test_languages_are_chosen_and_completed(mtrain, nllb, tmp_path):
    code, _, err = mtrain("import", nllb, tmp_path / "out")
    chosen = "--from eng_Latn --to zho_Hant"
    assert code == 0 and err.endswith(f"next: mtrain translate {tmp_path / 'out'} {chosen} 'Hello.'\n")
    code, _, err = mtrain("average", tmp_path / "out", tmp_path / "out", "-o", tmp_path / "average")
    assert code == 0 and f"mtrain translate {tmp_path / 'average'} {chosen} 'Hello.'" in err
    files = ["--source", tmp_path / "text", "--reference", tmp_path / "text"]
    (tmp_path / "text").write_text("A dog.\n")
    code, _, err = mtrain("evaluate", tmp_path / "out", *files, "--from", "en", "--to", "zh-Hant")
    assert code == 0 and f"mtrain translate {tmp_path / 'out'} --from=en --to=zh-Hant -i" in err
    for given in (("eng_Latn", "deu_Latn"), ("en", "deu"), ("en-GB", "de")):
        code, out, _ = mtrain("translate", tmp_path / "out", "--from", given[0], "--to", given[1], "A dog.")
        assert code == 0 and out.count("\n") == 1
    for given, message in (
        (["--from", "en"], "such as eng_Latn, fra_Latn, deu_Latn; give the two to translate between"),
        (["--from", "en", "--to", "zh"], "language zh: several codes of the model fit: zho_Hans, zho_Hant"),
        (
            ["--from", "engl_Latn", "--to", "de"],
            "language engl_Latn: the model has no such language; did you",
        ),
    ):
        code, _, err = mtrain("translate", tmp_path / "out", *given, "A dog.")
        assert code == 2 and message in one_line(err)


def test_punctuation_is_normalized_for_nllb(nllb, tmp_path):
    import_model(str(nllb), tmp_path / "out", ["source_lang=eng_Latn", "target_lang=fra_Latn"])
    loaded = load_model(tmp_path / "out")
    assert loaded.config.normalizes_punctuation
    quoted = "\u201eHe said\u2026\u201c \u2014 \u2018no\u2019"
    plain = "\"He said...\" - 'no'"
    assert loaded.tokenizer.encode_source([quoted]) == loaded.tokenizer.encode_source([plain])
    begins = loaded.tokenizer.source.positions([quoted])[0]
    ids = loaded.tokenizer.encode_source([quoted])[0]
    pieces = [loaded.tokenizer.source.pieces[i] for i in ids]
    assert begins[pieces.index("'")] in (quoted.index("\u2018"), quoted.index("\u2019"))


def test_an_export_may_normalize_punctuation_otherwise_than_transformers(tmp_path):
    make(tmp_path / "hf", write_m2m_tokenizer(tmp_path / "hf"))
    settings = ["source_lang=en", "target_lang=de", "normalizes_punctuation=true"]
    import_model(str(tmp_path / "hf"), tmp_path / "model", settings)
    texts = ["\u201eA dog.\u201c"]
    [summary] = export_model(tmp_path / "model", tmp_path / "out", "transformers", texts=texts)
    assert "1 translations identical" in summary


@pytest.mark.parametrize("new", [False, True])
def test_added_words_are_not_languages(mtrain, originals, tmp_path, new):
    folder = Path(shutil.copytree(originals[new], tmp_path / "nllb"))
    edit(folder / "config.json", vocab_size=309)
    file = folder / ("tokenizer.json" if new else "tokenizer_config.json")
    added = json.loads(file.read_text())["added_tokens" if new else "added_tokens_decoder"]
    word = {**(added[0] if new else added["301"]), "content": "Oz", "special": False}
    if new:
        edit(file, added_tokens=[*added, {**word, "id": 307}])
        del word["id"]
    else:
        edit(file, added_tokens_decoder=added | {"307": word})
        (folder / "added_tokens.json").write_text('{"Oz": 307}')
    code, _, err = mtrain("import", folder, tmp_path / "out")
    assert code == 0
    assert (
        "1 added word(s), such as Oz, are segmented like other text; if one is the code of a language" in err
    )
    loaded = load_model(tmp_path / "out")
    assert loaded.config.languages == CODES and 307 not in loaded.config.decoding.forbidden_ids
    assert loaded.tokenizer.decode([[307]]) == ["Oz"]
    export_model(tmp_path / "out", tmp_path / "back", "m2m_100", texts=TEXTS[:1])
    described = json.loads((tmp_path / "back" / "tokenizer_config.json").read_text())["added_tokens_decoder"]
    assert described["307"] == {**dict.fromkeys(word, False), "content": "Oz"}
    assert described["306"]["special"] and described["301"]["special"]


@pytest.mark.parametrize("format", ["m2m_100", "ctranslate2"])
@pytest.mark.parametrize("legacy", [True, False])
def test_exports_are_compared_with_codes(ctranslate2, nllb, tmp_path, legacy, format):
    edit(nllb / "tokenizer_config.json", legacy_behaviour=legacy, tgt_lang="deu_Latn")
    import_model(str(nllb), tmp_path / "model")
    export_model(tmp_path / "model", tmp_path / "out", format, texts=TEXTS[:1])
    loaded = load_model(tmp_path / "model")
    if format == "m2m_100":
        exported = open_transformers(tmp_path / "out", loaded)
    else:
        exported = open_ctranslate2(tmp_path / "out", loaded, None)
        limits = (loaded.config.decoding.max_length_ratio, loaded.config.decoding.max_length_offset)
        assert (exported.decoding.max_length_ratio, exported.decoding.max_length_offset) == limits
    rows: list[list[int]] = []

    def record(row: list[int], limit: int) -> list[int]:
        rows.append(row)
        return exported.translate(row, limit)

    [summary] = verify(
        loaded, exported._replace(translate=record), sentences_of(loaded, TEXTS[:3]), exact=True
    )
    assert summary.startswith("3 sentences: 3 translations identical (greedy)")
    with Translator.load(tmp_path / "model", "cpu").between("en", "de") as translator:
        assert rows == translator.splitter.encode(TEXTS[:3])
    for changed, reason in (({"encode": lambda _: [3]}, "ids"), ({"decode": lambda _: "other"}, "text")):
        with pytest.raises(ModelError, match=f"the exported tokenizer differs: the {reason} of"):
            verify(loaded, exported._replace(**changed), sentences_of(loaded, TEXTS[:1]), exact=True)
    assert exported.translate(rows[0], 5)[0] == loaded.tokenizer.source.codes["deu_Latn"]


# ------------------------------------------------------------------------------------------------ fine-tuning


@pytest.mark.parametrize("legacy", [True, False])
def test_training_pairs_have_the_codes_of_transformers(nllb, tmp_path, legacy):
    """In two directions. In the legacy form, Transformers also puts the code after the target, where
    `generate` does not expect it."""
    edit(nllb / "tokenizer_config.json", legacy_behaviour=legacy)
    tokenizer = load_model(import_without_normalization(nllb, tmp_path / "out")).tokenizer
    turned = [pair[::-1] for pair in PAIRS[10:20]]
    back = {**write(tmp_path / "back", turned), "source_lang": "fr", "target_lang": "en"}
    corpora = [write(tmp_path / "there", PAIRS[:10]), back]
    data = config(tmp_path, corpora, language_tags="codes_last" if legacy else "codes")
    theirs, expected = transformers().NllbTokenizer.from_pretrained(nllb), []
    for pairs, (source, target) in ((PAIRS[:10], CODES[:2]), (turned, CODES[1::-1])):
        theirs.src_lang, theirs.tgt_lang = source, target
        code = [theirs.convert_tokens_to_ids(target)]
        for pair in pairs:
            labels = theirs(text_target=pair[1]).input_ids
            expected.append((theirs(pair[0]).input_ids, [*code, *labels[:-1]] if legacy else labels))
    prepared = prepare_data(data, tokenizer, tmp_path / "data", seed=1)
    assert sorted(rows(prepared)) == sorted(expected)
    augmented = data.model_copy(update={"augment": Augment(merge=1.0)})
    for ids, labels in PairAugmenter(augmented.augment, augmented, tokenizer)(expected, random.Random(1)):
        assert {ids[-1 if legacy else 0], labels[0]} == {301, 302}
        assert len({301, 302} & {*ids}) == 1 and ids.count(2) == 1


def test_an_imported_model_is_fine_tuned(nllb, tmp_path):
    import_model(str(nllb), tmp_path / "out")
    data = {**write(tmp_path / "pairs", PAIRS[:40])}
    raw = {
        "run_dir": str(tmp_path / "run"),
        "data": {"source_lang": "en", "target_lang": "fr", "train": data, "validation": data},
        "training": {"init_from": str(tmp_path / "out"), "max_steps": 2, "learning_rate": 1e-4},
    }
    settings = validate(Config, {**raw, "export": {"require": ["marian"]}}, "test")
    for start in (partial(fit, settings, device="cpu"), partial(prepare_only, settings)):
        with pytest.raises(
            UsageError, match=r"marian .* it is not for models imported from M2M-100 .*; use tr"
        ):
            start()
        assert not (tmp_path / "run").exists()
    fit(validate(Config, raw, "test"), device="cpu")
    tuned = load_model(tmp_path / "run")
    assert tuned.config.normalizes_punctuation and tuned.config.language_tags == "codes"
    with Translator.load(tmp_path / "run", "cpu", workers=1) as translator:
        assert translator.direction == ("eng_Latn", "fra_Latn")
        assert len(translator.translate(TEXTS[:3])) == 3
    assert (tuned.config.source_lang, tuned.config.target_lang) == ("eng_Latn", "fra_Latn")  # for exports
    assert "license: cc-by-nc-4.0" in (tmp_path / "run" / "model" / "README.md").read_text()


def test_a_model_without_language_tags_may_have_a_vocabulary_with_codes(mtrain, nllb, tmp_path):
    """Its languages need no codes, or only one of several that fit."""
    import_model(str(nllb), tmp_path / "imported")
    data = {**write(tmp_path / "pairs", PAIRS[:40])}
    raw = {
        "run_dir": str(tmp_path / "run"),
        "data": {"source_lang": "en", "target_lang": "zh", "train": data, "validation": data},
        "tokenizer": {"path": str(tmp_path / "imported")},
        "model": {"d_model": 16, "heads": 2, "ffn_dim": 16, "encoder_layers": 1, "decoder_layers": 1},
        "training": {"max_steps": 2},
    }
    fit(validate(Config, raw, "test"), device="cpu")
    assert load_model(tmp_path / "run").config.languages == []
    with Translator.load(tmp_path / "run", "cpu", workers=1) as translator:
        assert translator.direction == ("en", "zh") and len(translator.translate(TEXTS[:2])) == 2
    assert "between" not in mtrain("info", tmp_path / "run")[1]


# ---------------------------------------------------------------------------------------- files of the folder


def test_license_and_origin_are_stated(mtrain, nllb, tmp_path):
    import_model(str(nllb), tmp_path / "out")
    _, out, _ = mtrain("info", tmp_path / "out")
    assert "cc-by-nc-4.0" in out and "converted from nllb" in out and "between 5: eng_Latn, fra_Latn" in out
    card = (tmp_path / "out" / "README.md").read_text()
    assert "license: cc-by-nc-4.0" in card and "translates between 5 languages" in card
    assert "normalized as by Moses" in card and "--from eng_Latn --to zho_Hant" in card
    (nllb / "card.md").write_text("---\nlicense: mit\n---\n# Mine\n")
    (nllb / "README.md").symlink_to(nllb / "card.md")  # as in the cache of the Hub
    import_model(str(nllb), tmp_path / "other", ["source_lang=en", "target_lang=fr"])
    _, out, _ = mtrain("info", tmp_path / "other")
    assert "eng_Latn to fra_Latn by default, between 5: eng_Latn" in out and ", normalizes punctuation" in out
    origin = read_info(tmp_path / "other").origin
    assert origin is not None and origin.license == "mit"


def test_a_missing_shard_is_named(mtrain, tmp_path):
    folder = tmp_path / "in"
    make(folder, write_nllb_tokenizer(folder, new=True), shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    code, _, err = mtrain("import", folder, tmp_path / "out")
    assert code == 4 and "model-00002-of-00003.safetensors: missing" in one_line(err)


def test_old_files_of_fairseq_are_imported(nllb, tmp_path):
    """As .bin, in fp16, with tables of positions and versions."""
    tensors = load_file(nllb / "model.safetensors")
    model = transformers().M2M100ForConditionalGeneration.from_pretrained(nllb)
    for side in ("encoder", "decoder"):
        tensors[f"model.{side}.embed_positions.weights"] = getattr(model.model, side).embed_positions.weights
        tensors[f"model.{side}.version"] = torch.tensor([3.0])
        tensors[f"model.{side}.embed_tokens.weight"] = tensors["model.shared.weight"]
    tensors["lm_head.weight"] = tensors["model.shared.weight"]
    torch.save({name: tensor.half() for name, tensor in tensors.items()}, nllb / "pytorch_model.bin")
    expected = load_file(nllb / "model.safetensors")["model.shared.weight"].half().float()
    (nllb / "model.safetensors").unlink()
    import_model(str(nllb), tmp_path / "out")
    assert torch.equal(load_model(tmp_path / "out").model.source_embedding.weight, expected)
    tensors["model.encoder.embed_positions.weights"] = torch.zeros(66, 32)
    torch.save(tensors, nllb / "pytorch_model.bin")
    with pytest.raises(ModelError, match="positional encodings that are not sinusoidal"):
        import_model(str(nllb), tmp_path / "other")


def test_missing_keys_have_the_values_of_transformers(nllb, tmp_path):
    """M2M100Config differs from MarianConfig, and does not have all of its keys."""
    import_model(str(nllb), tmp_path / "expected")
    names = ["attention_dropout", "activation_dropout", "dropout", "scale_embedding", "activation_function"]
    names += ["eos_token_id", "decoder_start_token_id", "tie_word_embeddings"]
    other = {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 5}
    edit(nllb / "config.json", **dict.fromkeys(names), **other)
    import_model(str(nllb), tmp_path / "out")
    model = load_model(tmp_path / "out").config.model
    assert model == load_model(tmp_path / "expected").config.model
    assert model.attention_dropout == transformers().M2M100Config().attention_dropout


@pytest.mark.parametrize("shared", [False, True])
def test_untied_embeddings(nllb, tmp_path, shared):
    """Transformers 4 shares the embeddings of source and target, Transformers 5 does not."""
    theirs = make(nllb, 309, tie_word_embeddings=False)
    if shared:
        for side in (theirs.model.encoder, theirs.model.decoder):
            side.embed_tokens.weight = theirs.model.shared.weight
        names = {f"model.{side}.embed_tokens.weight" for side in ("encoder", "decoder")}
        stored = {name: tensor for name, tensor in theirs.state_dict().items() if name not in names}
        save_file(stored, nllb / "model.safetensors")
    import_model(str(nllb), tmp_path / "out")
    assert largest_difference(theirs, load_model(tmp_path / "out").model) < 1e-5


def test_transformers_is_not_needed(nllb, tmp_path, monkeypatch):
    for name in ("transformers", "tokenizers", "sacremoses"):
        monkeypatch.setitem(sys.modules, name, None)
    import_model(str(nllb), tmp_path / "out")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"normalizer": {"type": "Lowercase"}}, "unsupported: the normalizer Lowercase"),
        ({"model": None}, "not the tokenizer of NLLB-200"),
        (
            {"pre_tokenizer": {"type": "Metaspace", "replacement": "_", "prepend_scheme": "always"}},
            "only BPE",
        ),
        ({"added_tokens": []}, "has no codes of languages"),
    ],
)
def test_another_tokenizer_is_an_error(new_nllb, tmp_path, changes, message):
    edit(new_nllb / "tokenizer.json", **changes)
    with pytest.raises(ModelError, match=message):
        import_model(str(new_nllb), tmp_path / "out")


def test_pieces_may_include_the_codes(new_nllb, tmp_path):
    """As in the published file of NLLB-200, in what Transformers 5 saves from it, and in its older form."""
    expected = import_without_normalization(new_nllb, tmp_path / "expected")
    found = json.loads((new_nllb / "tokenizer.json").read_text())
    found["model"]["vocab"] |= {each["content"]: each["id"] for each in found["added_tokens"]}
    del found["pre_tokenizer"]["prepend_scheme"]
    found["pre_tokenizer"]["add_prefix_space"] = True
    edit(new_nllb / "tokenizer.json", **found)
    imported = import_without_normalization(new_nllb, tmp_path / "out")
    assert load_model(imported).tokenizer.fingerprint == load_model(expected).tokenizer.fingerprint


def test_default_languages_are_completed_and_checked(nllb, tmp_path):
    with pytest.raises(UsageError, match="language zh: several codes of the model fit"):
        import_model(str(nllb), tmp_path / "out", ["source_lang=en", "target_lang=zh"])
    import_model(str(nllb), tmp_path / "out", ["source_lang=en", "target_lang=fr"])
    config = load_model(tmp_path / "out").config
    assert (config.source_lang, config.target_lang) == ("eng_Latn", "fra_Latn")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "--from eng_Latn --to fra_Latn" in card
    assert "cc-by-nc-4.0, as of the original model" in card and "Not stated" not in card


def test_merges_that_sentencepiece_would_not_make_are_an_error(new_nllb, tmp_path):
    model = json.loads((new_nllb / "tokenizer.json").read_text())["model"]
    merged = ["".join(pair) for pair in model["merges"]]
    first = next(i for i, piece in enumerate(merged) if merged.count(piece) > 1)
    del model["merges"][first]
    edit(new_nllb / "tokenizer.json", model=model)
    with pytest.raises(ModelError, match="SentencePiece cannot reproduce its merges"):
        import_model(str(new_nllb), tmp_path / "out")


def test_files_without_what_is_needed_are_errors(nllb, tmp_path):
    shutil.copytree(nllb, tmp_path / "copy")
    (tmp_path / "copy" / "sentencepiece.bpe.model").unlink()
    with pytest.raises(ModelError, match=r"contains neither sentencepiece\.bpe\.model nor tokenizer\.json"):
        import_model(str(tmp_path / "copy"), tmp_path / "out")
    edit(nllb / "tokenizer_config.json", tokenizer_class="SMALL100Tokenizer")
    with pytest.raises(ModelError, match="unsupported: tokenizer_class: 'SMALL100Tokenizer'"):
        import_model(str(nllb), tmp_path / "out")
    edit(nllb / "tokenizer_config.json", tokenizer_class="NllbTokenizerFast")
    (nllb / "tokenization_small100.py").touch()
    with pytest.raises(ModelError, match=r"has code of its own for its tokenizer: tokenization_small100\.py"):
        import_model(str(nllb), tmp_path / "custom")
    (nllb / "tokenization_small100.py").unlink()
    edit(nllb / "config.json", vocab_size=300)
    with pytest.raises(ModelError, match=r"vocab_size of config\.json is 300, but embeddings have"):
        import_model(str(nllb), tmp_path / "out")
    with pytest.raises(UsageError, match="only decoding"):
        edit(nllb / "config.json", vocab_size=309)
        import_model(str(nllb), tmp_path / "out", ["max_length=3"])


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        ("config.json", {"model_type": ["m2m_100"]}, r"model_type in config\.json is \['m2m_100'\]"),
        ("config.json", {"vocab_size": 10**12}, r"vocab_size of config\.json is 10{12}, but embeddings have"),
        ("tokenizer_config.json", {"additional_special_tokens": 4}, "is not a list of tokens: 4"),
        ("tokenizer_config.json", {"added_tokens_decoder": [1]}, "added to the vocabulary are damaged"),
        (
            "tokenizer_config.json",
            {"added_tokens_decoder": {"²": "x"}},
            "added to the vocabulary are damaged",
        ),
        ("added_tokens.json", {"x": [1]}, "are not distinct ids of"),
        ("added_tokens.json", {"\ud800": 308}, "has tokens that are not valid Unicode"),
    ],
)
def test_damaged_files_are_errors(nllb, tmp_path, file, changes, message):
    path = nllb / file
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | changes))
    with pytest.raises(ModelError, match=message):
        import_model(str(nllb), tmp_path / "out")


@pytest.mark.parametrize(
    "changes", [{"vocab": 5}, {"vocab": {"\ud800": 4}}, {"merges": ["abc"]}, {"merges": [["a", []]]}]
)
def test_a_damaged_tokenizer_json_is_an_error(new_nllb, tmp_path, changes):
    model = json.loads((new_nllb / "tokenizer.json").read_text())["model"]
    edit(new_nllb / "tokenizer.json", model=model | changes)
    with pytest.raises(ModelError, match="not the tokenizer of NLLB-200"):
        import_model(str(new_nllb), tmp_path / "out")


def test_a_damaged_sentencepiece_model_is_named(new_nllb, tmp_path):
    edit(new_nllb / "tokenizer.json", normalizer={"type": "Precompiled", "precompiled_charsmap": "eHh4"})
    with pytest.raises(ModelError, match=re.escape(f"{new_nllb / 'tokenizer.json'} (converted): not a Sent")):
        import_model(str(new_nllb), tmp_path / "out")
    size, file = write_m2m_tokenizer(tmp_path / "m2m"), tmp_path / "m2m" / "sentencepiece.bpe.model"
    file.write_bytes(b"damaged")
    with pytest.raises(ModelError, match=re.escape(f"{file}: not a SentencePiece model")):
        take_tokenizer(tmp_path / "m2m", tmp_path / "out", size)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("model.encoder.embed_positions.weights", torch.tensor(1.0), "encodings that are not sinusoidal"),
        ("model.encoder.layer_norm.weight", torch.ones(32, dtype=torch.float8_e4m3fn), "not a dense tensor"),
    ],
)
def test_damaged_weights_are_errors(nllb, tmp_path, name, tensor, message):
    file = min(nllb.glob("model*.safetensors"))
    save_file(load_file(file) | {name: tensor}, file)
    if (index := nllb / "model.safetensors.index.json").exists():
        edit(index, weight_map=json.loads(index.read_text())["weight_map"] | {name: file.name})
    with pytest.raises(ModelError, match=message):
        import_model(str(nllb), tmp_path / "out")


_PEAK = """
import re, sys
from pathlib import Path
from mtrain.interop.import_model import import_model

def memory(name):
    return 1024 * int(re.search(name + r":\\s*(\\d+)", Path("/proc/self/status").read_text())[1])

small, large, out = sys.argv[1:]
import_model(small, Path(out, "small"))  # imports modules
before = memory("VmRSS")
import_model(large, Path(out, "large"))
print(memory("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize("shards", [1, 3])
def test_memory_is_little_more_than_the_file(nllb, tmp_path, shards):
    folder = tmp_path / "in"
    size = write_nllb_tokenizer(folder, new=False)
    layers = {"encoder_layers": 3, "decoder_layers": 3, "d_model": 512, "encoder_attention_heads": 8}
    widths = {"decoder_attention_heads": 8, "encoder_ffn_dim": 2048, "decoder_ffn_dim": 2048}
    make(folder, size + 40_000, shards=shards, **layers, **widths)
    total = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    command = [sys.executable, "-c", _PEAK, str(nllb), str(folder), str(tmp_path)]
    peak = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert 0.5 * total < peak < 1.3 * total
