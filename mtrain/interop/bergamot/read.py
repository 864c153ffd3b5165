"""Import of models that Marian has trained (Junczys-Dowmunt et al., "Marian", ACL 2018), with vocabularies as
in OPUS-MT (`source.spm`, `target.spm` and `*vocab.yml`), or SentencePiece models alone, as in Bergamot."""

import json
import logging
import re
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import yaml
from torch import Tensor

from mtrain.config.language_names import find_language
from mtrain.config.load import validate
from mtrain.config.schema import ModelFolderConfig
from mtrain.config.sections.model import ModelConfig
from mtrain.config.yaml_io import YamlError, parse_yaml
from mtrain.errors import ModelError
from mtrain.interop.bergamot.names import architecture_of, from_native
from mtrain.interop.bergamot.weights import read_weights
from mtrain.interop.bergamot.write import DESCRIPTION
from mtrain.interop.huggingface import read_object
from mtrain.interop.m2m_100_tokenizer import ImportedTokenizer
from mtrain.interop.marian_tensors import DECODER, ENCODER, SHARED, from_transformers, with_more_tokens
from mtrain.regular_files import read_file
from mtrain.storage.atomic import write_text
from mtrain.tokenizer.tokenizer import Tokenizer
from mtrain.tokenizer.vocabulary import Vocabulary, load_model_file

log = logging.getLogger(__name__)

Converted = tuple[dict[str, Tensor], ModelFolderConfig, ImportedTokenizer]  # what an import makes
_SIDES = ({"source", "src"}, {"target", "trg", "tgt"})  # in the names of vocabularies
_MAX_LENGTH = 512  # tokens; Marian does not store the limit
_MAX_VOCABULARY = 2**26  # bytes of a vocabulary in YAML
_YAML: type[yaml.BaseLoader] = getattr(yaml, "CBaseLoader", yaml.BaseLoader)  # values are texts


def native_weights(folder: Path) -> Path | None:
    """The weights of Marian in a folder: a file `*.npz` or `model*.bin`, unless there is the config.json of
    Transformers. None if there are none. Raises ModelError if there are several, or a compressed one."""
    if (folder / "config.json").exists():
        return None
    files = sorted([*folder.glob("*.npz"), *folder.glob("model*.bin")])
    found = [file for file in files if not file.name.endswith(".optimizer.npz")]
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        cure = "give a folder with one of them and the vocabularies"
        raise ModelError(f"{folder}: contains several models: {names}; {cure}")
    for ending, program in ((".gz", "gunzip"), (".zst", "unzstd")):
        if not found and (compressed := sorted(folder.glob(f"model*.bin{ending}"))):
            cure = f"decompress the files with {program}"
            raise ModelError(f"{compressed[0]}: is compressed, as for Firefox; {cure}")
    return found[0] if found else None


def convert_native(file: Path, into: Path, source: str) -> Converted:
    """The weights and settings of a model of Marian, and its tokenizer, which is written to a folder.

    The decoder starts with a vector of zeros: the embedding of BOS, or of <pad>, which is added. Raises
    ModelError if something is missing, damaged or unsupported.
    """
    arrays, text = read_weights(file)
    try:
        options = parse_yaml(text)
    except YamlError as error:
        raise ModelError(f"{file}: the options of the model are not valid YAML: {error}") from None
    if not isinstance(options, dict):
        raise ModelError(f"{file}: the options of the model are not a mapping")
    raw = architecture_of(options, file) | {"max_positions": _MAX_LENGTH}
    raw |= {"source_vocab_size": 1, "target_vocab_size": 1}  # until the vocabularies are known
    theirs = from_native(arrays, validate(ModelConfig, raw, str(file), ModelError))
    source_table, target_table = (_table(theirs, name, file) for name in (ENCODER, DECODER))
    zeros = (~target_table.any(dim=1)).nonzero().flatten().tolist()
    tokenizer = _take_vocabularies(file.parent, into, [len(source_table), len(target_table)], zeros)
    sizes = tokenizer.source_vocab_size, tokenizer.target_vocab_size
    theirs = with_more_tokens(theirs, sizes[0] - len(source_table), sizes[1] - len(target_table))
    raw |= tokenizer.special.options()
    raw |= {"source_vocab_size": sizes[0], "target_vocab_size": sizes[1]}
    model = validate(ModelConfig, raw, str(file), ModelError)
    shared, tied = model.tie_embeddings == "all", model.tie_embeddings != "none"
    ties = {"share_encoder_decoder_embeddings": shared, "tie_word_embeddings": tied}
    tensors, model = from_transformers(theirs, ties, model, file)
    settings = {
        **_languages_in(file.parent),
        "max_length": _MAX_LENGTH,
        "tokenizer": {"vocab_size": sizes[0], "joint": tokenizer.joint, "path": source},
        "model": model.model_dump(mode="json"),
        "decoding": {"forbidden_ids": [model.unk_id]},  # which Marian never generates
    }
    return tensors, validate(ModelFolderConfig, settings, source, ModelError), ImportedTokenizer(tokenizer)


def _table(theirs: dict[str, Tensor], name: str, file: Path) -> Tensor:
    """The embeddings of a side, which may be shared. Raises ModelError if there are none."""
    table = theirs.get(name, theirs.get(SHARED))
    if table is None or table.dim() != 2:
        raise ModelError(f"{file}: has no matrix of embeddings, such as Wemb")
    return table


def _languages_in(folder: Path) -> dict[str, str]:
    """The keys of a model folder for languages, from translateLocally's description of the model, if any."""
    described = read_object(folder / DESCRIPTION, optional=True)
    tags = described.get("srcTags")
    source = next(iter(tags)) if isinstance(tags, dict) and len(tags) == 1 else described.get("src")
    given = {"source_lang": source, "target_lang": described.get("trgTag", described.get("trg"))}
    return {key: find_language(str(language or "")) or "und" for key, language in given.items()}


def _take_vocabularies(folder: Path, into: Path, rows: Sequence[int], zeros: Sequence[int]) -> Tokenizer:
    """Write the vocabularies of a model of Marian as a `tokenizer/` folder. `rows` are the numbers of
    embeddings of source and target, `zeros` the tokens of the target whose embeddings are zero.

    The ids of the SentencePiece models are used if they include a BOS in `zeros`, as in exports of mtrain.
    Otherwise, files map pieces to ids, and <pad> gets the id after all rows. Raises ModelError.
    """
    models, listed = [*folder.glob("*.spm")], [*folder.glob("*vocab*.yml")]
    if len(models) == 2 and not listed and read_file(models[0]) == read_file(models[1]):
        models.pop()
    if len(models) not in (1, 2) or len(listed) > 2:
        found = ", ".join(file.name for file in [*models, *listed]) or "none"
        wanted = "source.spm and target.spm with *vocab.yml, vocab*.spm, or srcvocab*.spm and trgvocab*.spm"
        raise ModelError(f"{folder}: the vocabularies must be {wanted}; found: {found}")
    models, listed = _source_first(models), _source_first(listed)
    into.mkdir()
    names = ["joint"] if len(models) == 1 else ["source", "target"]
    for name, model in zip(names, models, strict=True):
        shutil.copyfile(model, into / f"{name}.model")
    if not listed and _has_own_ids([into / f"{name}.model" for name in names], rows, zeros):
        return Tokenizer(into)
    own = (load_model_file(model)[1] for model in models)
    mappings = [*map(_read_ids, listed)] or [{piece: i for i, piece in enumerate(pieces)} for pieces in own]
    prefixes = [""] if len(mappings) == 1 else ["source_", "target_"]
    for prefix, ids, count in zip(prefixes, mappings, rows, strict=False):
        if not listed and len(ids) < count:
            missing = f"{count - len(ids)} of its {count} tokens are not in its SentencePiece model"
            log.warning("%s: %s; tags such as >>deu<< need the *vocab.yml of the model", folder, missing)
        contents = json.dumps(ids | {"<pad>": count}, ensure_ascii=False)
        write_text(into / f"{prefix}vocab.json", contents)
    return Tokenizer(into)


def _source_first(files: list[Path]) -> list[Path]:
    """Two files of vocabularies, the one of the source first, or a single file. Their names must say which is
    which: codes of languages do not. Raises ModelError."""
    sides = dict[int, Path]()
    for file in files:
        words = re.findall("[a-z]+", file.name.lower().replace("vocab", "."))
        sides |= {side: file for side, names in enumerate(_SIDES) if names & {*words}}
    if len(files) == 2 and len({*sides.values()}) < 2:
        found = " and ".join(sorted(file.name for file in files))
        cure = "let one name begin with source, and the other with target"
        raise ModelError(f"{files[0].parent}: found {found}, and cannot tell which side is which; {cure}")
    return [sides[0], sides[1]] if len(files) == 2 else files


def _has_own_ids(models: Sequence[Path], rows: Sequence[int], zeros: Sequence[int]) -> bool:
    """Whether SentencePiece models have all special tokens, and a BOS whose embedding is zero."""
    with suppress(ModelError):  # a special token is missing
        vocabularies = [Vocabulary(model) for model in models]
        sizes = [len(vocabularies[0]), len(vocabularies[-1])]
        return sizes == [*rows] and vocabularies[-1].special.bos in zeros
    return False


def _read_ids(file: Path) -> dict[str, int]:
    """The id of each piece in a vocabulary in YAML. Raises ModelError."""
    try:
        stored = yaml.load(read_file(file, _MAX_VOCABULARY), Loader=_YAML)
        return {piece: int(i) for piece, i in stored.items()}
    except (OSError, yaml.YAMLError, ValueError, TypeError, AttributeError, RecursionError) as error:
        problem = " ".join(str(error).split())
        raise ModelError(f"{file}: does not map pieces to ids: {problem}") from None
