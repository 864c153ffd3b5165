"""The tokenizer of a run: learned from the training text, or copied from another model."""

import json
import logging
from pathlib import Path

from mtrain.checkpoint.checkpoint import checkpoint_folders
from mtrain.checkpoint.model_folder import copy_tokenizer, tokenizer_folder
from mtrain.config.choices import Choice
from mtrain.config.schema import Config
from mtrain.config.sections.corpora import CorpusSpec
from mtrain.config.sections.tokenizer import TokenizerConfig
from mtrain.config.yaml_io import to_yaml
from mtrain.data.epochs.mixing import weights_by_size
from mtrain.data.prepare import make_scanner
from mtrain.data.preparing.inputs import PATHS, describe_data
from mtrain.data.rewriting.augment import Side, may_have_case, with_cases
from mtrain.data.scanning.block_check import Normalizers
from mtrain.data.scanning.scanner import CorpusScanner
from mtrain.data.store.folder import CURE, DataFolder, shared_tokenizer
from mtrain.errors import ModelError, UsageError
from mtrain.regular_files import read_file
from mtrain.storage.atomic import copy_files, write_folder, write_text
from mtrain.storage.manifest import MANIFEST
from mtrain.tokenizer.learn import Sentences, train_tokenizer
from mtrain.tokenizer.tokenizer import Tokenizer
from mtrain.tokenizer.vocabulary import make_normalizer, pattern_of
from mtrain.training.setup.resolve import find_tokenizer, resolve_config, tokenizer_settings
from mtrain.training.setup.run_folder import locked_run_folder, write_config

log = logging.getLogger(__name__)

_SETTINGS = "config.yaml"
_LEARNED_FROM = "learnt-from.json"
# Keys of a corpus that do not say what is read of its files.
_NOT_OF_TEXT = {*PATHS, *CorpusSpec.model_fields}


def tokenize(config: Config, force: bool = False) -> Tokenizer:
    """Create the run folder and its tokenizer, without training. Raises UsageError if the folder has another
    tokenizer that must be kept, ModelError if its tokenizer is missing."""
    run_dir = Path(config.run_dir)
    adapt_vocab_size = vocab_size_is_automatic(config)
    scanner = make_scanner(config.data, DataFolder.of_run(config.data, run_dir), config.seed)
    with locked_run_folder(run_dir):
        config = resolve_config(config, scanner, relearn=force, load_weights=False).config
        is_new = not checkpoint_folders(run_dir)
        if is_new:
            write_config(config)
        tokenizer = prepare_tokenizer(config, scanner, force, adapt_vocab_size)
        if is_new:
            write_config(with_learned_vocab_size(config))
        return tokenizer


def vocab_size_is_automatic(config: Config) -> bool:
    """Whether `model.preset: auto` chooses the vocabulary size. `config` must not be resolved yet."""
    is_automatic = config.model.preset == "auto" and not config.training.init_from
    return is_automatic and "vocab_size" not in config.tokenizer.model_fields_set


def vocab_size_choice(config: Config) -> list[Choice]:
    """The automatic vocabulary size, for the table of choices. A tokenizer from elsewhere has its own."""
    if config.tokenizer.path is not None:
        return []
    return [Choice("tokenizer.vocab_size", config.tokenizer.vocab_size, "the corpus and the limit")]


def with_learned_vocab_size(config: Config) -> Config:
    """The config with the vocabulary size of the learned tokenizer, which differs from the automatic choice
    if that does not fit the text."""
    learned = tokenizer_settings(Path(config.run_dir) / "tokenizer")
    return config if learned == config.tokenizer else config.model_copy(update={"tokenizer": learned})


def prepare_tokenizer(
    config: Config, scanner: CorpusScanner, force: bool = False, adapt_vocab_size: bool = False
) -> Tokenizer:
    """The tokenizer of the run. If there is none, learn it from the training text or copy `tokenizer.path`.

    `config` is resolved: unless with `force`, an automatic vocabulary size is already that of the existing
    tokenizer. With `adapt_vocab_size`, a `vocab_size` that does not fit the text is replaced (see
    `train_tokenizer`). Raises UsageError if the existing tokenizer was learned with other settings, or if
    checkpoints need the one that `force` would replace; ModelError if checkpoints need a tokenizer that is
    missing.
    """
    run_dir, shared = Path(config.run_dir), shared_tokenizer(config.data)
    folder, copies = run_dir / "tokenizer", run_dir / "model" / "tokenizer"
    trained = bool(checkpoint_folders(run_dir))
    hint = f"; {copies} has copies of the vocabularies" if trained and copies.is_dir() else ""
    if force and trained:
        raise UsageError(f"{run_dir}: its checkpoints need this tokenizer; give another --run-dir")
    if force and shared:
        raise UsageError(f"{shared}: may be in use by other runs; give another data.folder")
    if (folder / _SETTINGS).exists() and not force:
        if config.tokenizer != tokenizer_settings(folder):
            cure = "replace it with `mtrain tokenize CONFIG --force`"
            if trained or shared:  # see `force` above
                cure = "give another --run-dir" + " and another data.folder" * bool(shared)
            raise UsageError(f"{folder}: was learned with other tokenizer settings; restore them, or {cure}")
        if not trained and not shared:
            _warn_if_text_has_changed(folder, config, scanner)
        try:
            return Tokenizer(folder)
        except ModelError as error:
            raise ModelError(f"{error}{hint}") from None
    if trained:
        lost = folder / _SETTINGS if folder.exists() else folder
        cure = "restore it, or start another run with --run-dir"
        raise ModelError(f"{lost}: missing, but the checkpoints need it; {cure}{hint}")
    write_folder(folder, lambda temporary: _make_tokenizer(temporary, config, scanner, adapt_vocab_size))
    return Tokenizer(folder)


def _warn_if_text_has_changed(folder: Path, config: Config, scanner: CorpusScanner) -> None:
    file = folder / _LEARNED_FROM
    if not file.exists():
        return
    recorded = read_file(file)
    if recorded != _describe_text(config, scanner, b'"corpora"' in recorded).encode():
        log.warning(
            "data.train, filters, augment or temperature has changed since the tokenizer was learned; "
            "to learn it again, run `mtrain tokenize CONFIG --force`"
        )


def _describe_text(config: Config, scanner: CorpusScanner, corpora: bool = True) -> str:
    """The hashes of the training text, and the settings that change what is learned from it, as JSON. Earlier
    versions did not record `corpora`: which columns, fields or splits are read."""
    filters = describe_data(config.data).get("filters")
    further = [filters] if filters else []
    if config.data.augment is not None and (cases := config.data.augment.cases):
        further.append({"augment": cases})
    if config.data.temperature is not None:
        further.append({"temperature": config.data.temperature})
    if corpora:
        others = _NOT_OF_TEXT - ({"filters"} if filters else set())
        read = [corpus.model_dump(mode="json", exclude=others) for corpus in config.data.train]
        further.append({"corpora": read})
    return json.dumps([*scanner.files.content_hashes[: len(config.data.train)], *further]) + "\n"


def _make_tokenizer(folder: Path, config: Config, scanner: CorpusScanner, adapt_vocab_size: bool) -> None:
    """Write a tokenizer into an empty folder: a copy, or one that is learned."""
    settings, shared = config.tokenizer, shared_tokenizer(config.data)
    if shared is not None:
        if adapt_vocab_size:  # another run may have learned it since the config was resolved
            settings = settings.model_copy(update={"vocab_size": tokenizer_settings(shared).vocab_size})
        _require_same_tokenizer(settings, shared)
        copy_files(shared, folder, {MANIFEST})
    elif settings.path is None:
        source, target = _sampled_text(config, scanner)
        size = train_tokenizer(settings, source, target, folder, config.seed, adapt_vocab_size)
        settings = settings.model_copy(update={"vocab_size": size})
        write_text(folder / _LEARNED_FROM, _describe_text(config, scanner))
    else:
        copy_tokenizer(tokenizer_folder(Path(settings.path)), folder)
    write_text(folder / _SETTINGS, to_yaml(settings))


def _sampled_text(config: Config, scanner: CorpusScanner) -> tuple[Sentences, Sentences]:
    """The sources and the targets that a tokenizer is learned from. They are weighted by `data.temperature`.
    With `data.augment`, some have the letter case that training will have: otherwise, upper-cased words would
    be segmented into single letters. Raises DataError if `data.filters` leave no pair."""
    scanner.result.require_text()
    text, data = scanner.result.text, config.data
    weights = None
    if data.temperature is not None:
        weights = weights_by_size(text.sizes(len(data.train)), data.temperature)
    direction = data.common_direction(data.train)
    # If the source has no capitals, training changes neither side; see `change_pair`.
    if data.augment is None or not data.augment.cases or not may_have_case(direction.source):
        return (lambda: text.side(0, weights)), (lambda: text.side(1, weights))
    augment, symbols = data.augment, pattern_of(config.tokenizer.symbols)
    source, target = (Side(language, symbols) for language in direction)
    return (
        lambda: with_cases(text.side(0, weights), source, augment, config.seed),
        lambda: with_cases(text.side(1, weights), target, augment, config.seed),
    )


def _require_same_tokenizer(settings: TokenizerConfig, shared: Path) -> None:
    """Raise UsageError if the tokenizer in `data.folder` is not the one that `settings` describe."""
    learned = tokenizer_settings(shared)
    if settings.path is not None and Path(settings.path).exists():
        if Tokenizer(tokenizer_folder(Path(settings.path))).fingerprint != Tokenizer(shared).fingerprint:
            raise UsageError(f"{shared}: is not the tokenizer of {settings.path}; give another data.folder")
        return
    for key, old in learned.model_dump().items():
        if (new := getattr(settings, key)) != old:
            raise UsageError(f"{shared}: was learned with tokenizer.{key} {old}, not {new}; {CURE}")


def learns_tokenizer(config: Config) -> bool:
    """Whether `prepare_tokenizer` will learn a tokenizer. `config` need not be resolved."""
    reused = config.tokenizer.path or config.training.init_from
    return reused is None and find_tokenizer(config) is None


def existing_tokenizer(config: Config) -> Tokenizer | None:
    """The tokenizer of the run, of `data.folder`, of `tokenizer.path`, or of the model that training starts
    from, if it exists already. `config` need not be resolved."""
    folder, reused = find_tokenizer(config), config.tokenizer.path or config.training.init_from
    if folder is None and reused is not None:
        folder = tokenizer_folder(Path(reused))
    return None if folder is None else Tokenizer(folder)


def tokenizer_normalizers(config: Config) -> Normalizers:
    """The normalizers of the sides of a run's tokenizer, also if it is yet to be learned. `config` need not
    be resolved."""
    if (tokenizer := existing_tokenizer(config)) is None:
        return [make_normalizer(config.tokenizer.normalization)] * 2
    return [side.normalizer() for side in (tokenizer.source, tokenizer.target)]
