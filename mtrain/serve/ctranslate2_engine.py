"""Decoding by CTranslate2 in place of mtrain."""

import math
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from mtrain.checkpoint.model_folder import load_model
from mtrain.decoding.alignment import align, words_at
from mtrain.decoding.decode import DecodingTask
from mtrain.decoding.split import Part
from mtrain.decoding.translate import Translator
from mtrain.decoding.translation import Translation
from mtrain.errors import UsageError
from mtrain.interop.ctranslate2 import write_ctranslate2
from mtrain.interop.formats import import_optional
from mtrain.serve.batching import Decode


def ctranslate2_decoder(path: Path, translator: Translator, threads: int) -> Decode:
    """A function that decodes like a translator of the model at `path`, by CTranslate2 with `threads` threads
    for each of the translator's workers. Raises UsageError if CTranslate2 is not installed, or if
    translations are sampled or reranked."""
    ctranslate2, decoding, tokenizer = (
        import_optional("ctranslate2"),
        translator.decoding,
        translator.tokenizer,
    )
    if decoding.samples is not None or decoding.mbr is not None:
        raise UsageError("--engine ctranslate2 has no decoding.samples and decoding.mbr; use --engine mtrain")
    device, workers = translator.device, translator.workers.count
    with TemporaryDirectory() as folder:
        write_ctranslate2(load_model(path), Path(folder), None)
        places = {"device": device.type, "device_index": device.index or 0}
        engine = ctranslate2.Translator(folder, inter_threads=workers, intra_threads=threads, **places)
    source, target = tokenizer.source.pieces, tokenizer.target.pieces
    ids = {piece: i for i, piece in enumerate(target)}
    end = None if translator.language_tags == "codes_last" else -1  # before EOS, which CTranslate2 adds
    search = {
        "beam_size": decoding.beam_size,
        "patience": 2
        if decoding.stop == "default" and decoding.beam_size > 1
        else 1,  # see docs/how-to/export.md
        "length_penalty": decoding.length_penalty,
        "coverage_penalty": decoding.coverage_penalty,
        "no_repeat_ngram_size": decoding.no_repeat_ngram,
    }
    lengths = {"max_input_length": 0, "min_decoding_length": 0}

    def translations(part: Part, result: Any) -> list[Translation]:
        rows = [[ids[piece] for piece in pieces] for pieces in result.hypotheses]
        found = []
        for k, (row, text) in enumerate(zip(rows, tokenizer.decode(rows), strict=True)):
            words = words_at(text, tokenizer.target.decoded_positions(row))
            alignment = align(np.array(result.attention[k]), part.words, words) if result.attention else None
            found.append(Translation(text, math.nan, math.nan, len(row) + 1, True, alignment))
        return found

    def decode(task: DecodingTask) -> list[list[Translation]]:
        sources = [[source[i] for i in part.source[:end]] for part in task.parts]
        prefixes = [[target[i] for i in part.prefix] for part in task.parts]
        limit = int(max(map(len, sources)) * decoding.max_length_ratio) + decoding.max_length_offset
        wanted = {"num_hypotheses": task.n_best, "return_attention": task.alignments}
        results = engine.translate_batch(
            sources, prefixes, max_decoding_length=limit, **wanted, **search, **lengths
        )
        return [translations(part, result) for part, result in zip(task.parts, results, strict=True)]

    return decode
