"""The text of a model card, in Markdown, generated from what is known about the model."""

import re
from collections.abc import Iterator, Sequence
from itertools import chain

from mtrain.checkpoint.model_info import Ancestor, Description, Origin, Score
from mtrain.config.languages import Direction, base_language
from mtrain.duration import format_duration

_HOME = "https://github.com/mtrain/mtrain"
_LICENSES = "https://huggingface.co/docs/hub/repositories-licenses"
LIBRARIES = {"marian": "transformers", "ctranslate2": "ctranslate2"}  # that load exported models
_PROGRAMS = {"marian": "Hugging Face Transformers", "ctranslate2": "CTranslate2"}


def model_card(model: Description) -> str:
    """The card of a model, in Markdown. Its license is not stated, because it is not known."""
    sections = {
        "Use": model_usage(model),
        "Scores": _scores(model),
        "Training": _training(model),
        "Training data": _data(model),
        "License": _license(model),
    }
    text = f"---\n{_metadata(model)}---\n\n# {_inline(model.name)}\n\n{_introduction(model)}\n"
    return text + "".join(f"\n## {title}\n\n{body}\n" for title, body in sections.items() if body)


def _metadata(model: Description) -> str:
    from huggingface_hub import EvalResult, ModelCardData

    config, info = model.config, model.info
    library = LIBRARIES[info.export.format] if info.export else "mtrain"
    codes = (base_language(code) for code in (config.source_lang, *config.target_languages))
    languages = [code for code in dict.fromkeys(codes) if re.fullmatch("[a-z]{2,3}", code) and code != "und"]
    scores = [score for score in _comparable(model) if score.metric != "nll"]
    task = "text-classification" if config.model.is_classifier else "translation"
    direction = f"{config.source_lang}-{config.target_lang}"
    results = [
        EvalResult(
            task_type=task,
            task_name=f"{'Pair classification' if config.model.is_classifier else 'Translation'} {direction}",
            dataset_type=_identifier(score.set),
            dataset_name=score.set,
            dataset_split=score.split,
            metric_type=score.metric,
            metric_name=score.title,
            metric_value=float(score.rounded),
        )
        for score in scores
    ]
    corpora = chain(info.data.train, info.data.validation) if info.data else ()
    data = ModelCardData(
        language=languages or None,
        library_name=library,
        pipeline_tag=task,
        tags=list(dict.fromkeys([task, library, "mtrain"])),
        datasets=list(dict.fromkeys(corpus.hub for corpus in corpora if corpus.hub)) or None,
        base_model=list(dict.fromkeys(_hub_models(info.origin))) or None,
        metrics=list(dict.fromkeys(score.metric for score in scores)) or None,
        eval_results=results or None,
        model_name=model.name if results else None,
    )
    return f"{data.to_yaml()}\n"


def _comparable(model: Description) -> list[Score]:
    """The scores, unless an exported model may translate differently from the one that was scored."""
    export = model.info.export
    return [] if export is not None and (export.changed or export.quantization) else model.info.scores


def _identifier(name: str) -> str:
    """A name of a data set in the form that the Hub requires."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "unnamed"


def _hub_models(origin: Origin | None) -> Iterator[str]:
    """The models on the Hugging Face Hub that a model descends from."""
    for ancestor in origin.ancestors if origin else ():
        if ancestor.hub:
            yield ancestor.name
        else:
            yield from _hub_models(ancestor.origin)


def _introduction(model: Description) -> str:
    config, info = model.config, model.info
    architecture, maker = config.model, f"[mtrain]({_HOME})"
    size = f" with {model.parameters / 1e6:,.2f} million parameters" if model.parameters else ""
    languages = f"`{_code(config.source_lang)}` to `{_code(config.target_lang)}`"
    purpose = f"translates from {languages}. It is an encoder-decoder Transformer"
    layers = f"{architecture.encoder_layers} encoder and {architecture.decoder_layers} decoder layers"
    if architecture.is_classifier:
        purpose = (
            "estimates the probability that a sentence and its translation are a good pair, for "
            f"{languages}. It is a Transformer encoder with a classification layer"
        )
        layers = f"{architecture.encoder_layers} layers"
    lines = [
        f"This model {purpose}{size}: {layers} of width {architecture.d_model}, and a SentencePiece "
        f"vocabulary of {vocabulary_size(model)}."
    ]
    if config.language_tags != "none":
        tag = Direction(config.source_lang, config.target_lang).tag(config.language_tags)
        others = ", ".join(f"`{_code(language)}`" for language in config.target_languages)
        lines.append(
            f"It translates into several languages ({others}): a source begins with a tag such as "
            f"`{_code(tag)}`" + ("." if info.export else ", which `mtrain translate --to` adds.")
        )
    if origin := describe_origin(info.origin, code=True):
        lines.append(
            f"It was {origin} {'by' if info.origin and info.origin.kind == 'imported' else 'with'} {maker}."
        )
    if info.export:
        kind = f" ({_inline(info.export.quantization)})" if info.export.quantization else ""
        lines.append(f"Then it was exported to {_PROGRAMS[info.export.format]}{kind}.")
    return " ".join(lines)


def vocabulary_size(model: Description) -> str:
    """The sizes of the vocabularies of a model."""
    architecture = model.config.model
    sizes = architecture.source_vocab_size, architecture.target_vocab_size
    if model.config.tokenizer.joint:
        return f"{sizes[0]:,} entries"
    return f"{sizes[0]:,} source and {sizes[1]:,} target entries"


def describe_origin(origin: Origin | None, code: bool = False) -> str:
    """How a model was made, as a participle; empty if it is not known. With `code`, names are marked as code
    in Markdown."""
    if origin is None:
        return ""
    quote = "`" if code else ""
    names = [f"{quote}{_code(each.name) if code else each.name}{quote}" for each in origin.ancestors]
    if origin.kind == "imported":
        return f"converted from {', '.join(names)}"
    if origin.kind == "averaged":
        return f"made by averaging the weights of {', '.join(names)}"
    return f"fine-tuned from {', '.join(names)}" if names else "trained"


def model_usage(model: Description) -> str:
    """How to use a model, in Markdown. The code runs in the folder of the model, whatever its name is."""
    export, config = model.info.export, model.config
    tag = Direction(config.source_lang, config.target_lang).tag(config.language_tags)
    example = f"{_code(tag)} Hello.".lstrip()  # other programs do not add the tag
    installed = f"With [mtrain]({_HOME}) installed, run this in the folder of the model"
    if config.model.is_classifier:
        return (
            f"{installed} to add the probability as a column to a file whose first two columns are source "
            "and target:\n\n```bash\nmtrain score . --classifier --tsv pairs.tsv -o scored.tsv\n```"
        )
    if export is None:
        return (
            f'{installed}:\n\n```bash\nmtrain translate . "Hello."\n```\n\n'
            "```python\nfrom mtrain import Translator\n\n"
            'with Translator.load(".") as translator:\n'
            '    print(translator.translate(["Hello."])[0].text)\n```'
        )
    if export.format == "marian":
        return (
            "```python\nfrom transformers import MarianMTModel, MarianTokenizer\n\n"
            'tokenizer = MarianTokenizer.from_pretrained(".")\n'
            'model = MarianMTModel.from_pretrained(".")\n'
            f'output = model.generate(**tokenizer(["{example}"], return_tensors="pt"))\n'
            "print(tokenizer.batch_decode(output, skip_special_tokens=True))\n```\n\n"
            "Run this in the folder of the model, after `pip install transformers torch sentencepiece`."
        )
    joint = (model.folder / "joint.model").exists()
    sides = ("joint", "joint") if joint else ("source", "target")
    return (
        "```python\nimport ctranslate2\nimport sentencepiece\n\n"
        f'source = sentencepiece.SentencePieceProcessor(model_file="{sides[0]}.model")\n'
        f'target = sentencepiece.SentencePieceProcessor(model_file="{sides[1]}.model")\n'
        'translator = ctranslate2.Translator(".")\n'
        f'[result] = translator.translate_batch([source.encode("{example}", out_type=str)])\n'
        "print(target.decode(result.hypotheses[0]))\n```\n\n"
        "Run this in the folder of the model, after `pip install ctranslate2 sentencepiece`."
    )


def _scores(model: Description) -> str:
    scores = model.info.scores
    if not scores:
        return ""
    rows = [
        [each.set, f"{each.sentences:,}" if each.sentences else "", each.title, each.rounded, each.signature]
        for each in scores
    ]
    text = _table(["Set", "Sentences", "Metric", "Score", "Signature"], rows)
    notes = []
    if any(each.split == "validation" for each in scores):
        notes.append("The validation set selected this checkpoint, so its scores are optimistic.")
    if model.info.export:
        notes.append("The scores are those of the model before it was exported.")
    return "\n\n".join([text, *notes])


def _training(model: Description) -> str:
    training = model.info.training
    if training is None:
        return ""
    facts = {"Optimizer steps": f"{training.steps:,}"}
    if training.epochs:
        facts["Complete epochs"] = f"{training.epochs:,}"
    if training.target_tokens:
        facts["Target tokens"] = f"{training.target_tokens:,}"
    if training.seconds:
        facts["Time of training and validation"] = format_duration(training.seconds)
    if model.info.mtrain:
        facts["Version of mtrain"] = model.info.mtrain
    return "\n".join(f"- {name}: {_inline(value)}" for name, value in facts.items())


def _data(model: Description) -> str:
    data = model.info.data
    if data is None:
        return ""
    rows = [
        [corpus.name, use, f"{corpus.pairs:,}" if corpus.pairs is not None else "", corpus.sha256]
        for use, corpora in (("training", data.train), ("validation", data.validation))
        for corpus in corpora
    ]
    table = _table(["Corpus", "Use", "Pairs", "SHA-256 of its contents"], rows)
    return (
        f"{table}\n\nSHA-256 of all contents and of how they were encoded: `{_code(data.fingerprint or '')}`"
    )


def _license(model: Description) -> str:
    text = (
        "Not stated. mtrain does not know the license of the training data, which may restrict the use of "
        f"the model. To state a license, add `license:` with an [identifier]({_LICENSES}) to the metadata "
        "at the top of this file, and replace this section."
    )
    if originals := _originals(model.info.origin):
        text += f" The licenses of {', '.join(f'`{_code(name)}`' for name in originals)} also apply."
    return text


def _originals(origin: Origin | None) -> list[str]:
    """The models that a model was made from, directly or not, and that were not made from others."""

    def roots(ancestor: Ancestor) -> Iterator[str]:
        if ancestor.origin is not None and ancestor.origin.ancestors:
            yield from chain.from_iterable(map(roots, ancestor.origin.ancestors))
        elif not ancestor.repeated:
            yield ancestor.name

    ancestors = origin.ancestors if origin else []
    return list(dict.fromkeys(chain.from_iterable(map(roots, ancestors))))


def _table(columns: Sequence[str], rows: Sequence[Sequence[str | None]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(_inline(cell or '') for cell in line)} |" for line in lines)


def _inline(text: str) -> str:
    """Text of one line without any markup."""
    plain = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return re.sub(r"([\\`*\[\]<>|#&])", r"\\\1", plain)


def _code(text: str) -> str:
    """Text for a code span."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).replace("`", "'").split())
