"""The text of a model card, in Markdown, generated from what is known about the model."""

import re
from collections.abc import Iterable, Iterator
from itertools import chain

from mtrain.checkpoint.model_info import Ancestor, Description, Origin
from mtrain.config.languages import argos_code, base_language
from mtrain.config.schema import ModelFolderConfig
from mtrain.duration import format_duration
from mtrain.templates import load_templates

_HOME = "https://github.com/mtrain/mtrain"
LIBRARIES = {  # that load exported models, with their titles
    **dict.fromkeys(("marian", "pegasus", "m2m_100"), ("transformers", "Hugging Face Transformers")),
    "ctranslate2": ("ctranslate2", "CTranslate2"),
    "argos": ("argostranslate", "Argos Translate"),
    "bergamot": ("bergamot-translator", "Bergamot"),
}


def model_card(model: Description) -> str:
    """The card of a model, in Markdown. It states the license of the models that the model was imported from
    or descends from, if they have one license; that of other models is not known."""
    licenses = _unique(_licenses(model.info.origin)) or []
    license_ = licenses[0] if len(licenses) == 1 else None
    return _render(
        "card.md",
        model,
        license=license_,
        metadata=_metadata(model, license_),
        vocabulary=vocabulary_size(model),
        origin=describe_origin(model.info.origin, code=True),
        usage=model_usage(model),
        exported_to=LIBRARIES[model.info.export.format][1] if model.info.export else "",
        roots=_roots(model.info.origin),
    )


def _metadata(model: Description, license_: str | None) -> str:
    from huggingface_hub import EvalResult, ModelCardData

    config, info = model.config, model.info
    library = LIBRARIES[info.export.format][0] if info.export else "mtrain"
    codes = map(base_language, (config.source_lang, *config.target_languages))
    # An exported model may translate differently from the one that was scored.
    export = info.export
    other_search = export is not None and export.format in ("argos", "bergamot")
    may_differ = export is not None and (export.changed or export.quantization or other_search)
    scores = [] if may_differ else [score for score in info.scores if score.metric != "nll"]
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
        license=license_,
        language=_unique(code for code in codes if re.fullmatch("[a-z]{2,3}", code) and code != "und"),
        library_name=library,
        pipeline_tag=task,
        tags=_unique([task, library, "mtrain"]),
        datasets=_unique(corpus.hub for corpus in corpora if corpus.hub),
        base_model=_unique(root.name for root in _roots(info.origin) if root.hub),
        metrics=_unique(score.metric for score in scores),
        eval_results=results or None,
        model_name=model.name if results else None,
    )
    return data.to_yaml()


def _unique(values: Iterable[str]) -> list[str] | None:
    """The values without repetitions; None instead of an empty list."""
    return list(dict.fromkeys(values)) or None


def _licenses(origin: Origin | None) -> Iterator[str]:
    """The licenses of a model and of the models that it descends from."""
    if origin is not None:
        yield from filter(None, [origin.license])
        for ancestor in origin.ancestors:
            yield from _licenses(ancestor.origin)


def _identifier(name: str) -> str:
    """A name of a data set in the form that the Hub requires."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "unnamed"


def _roots(origin: Origin | None) -> Iterator[Ancestor]:
    """The models that a model descends from, and that were not made from others."""
    for ancestor in origin.ancestors if origin else ():
        if ancestor.origin is not None and ancestor.origin.ancestors:
            yield from _roots(ancestor.origin)
        else:
            yield ancestor


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
    names = ", ".join(f"`{_code(each.name)}`" if code else each.name for each in origin.ancestors)
    if origin.kind == "imported":
        return f"converted from {names}"
    if origin.kind == "averaged":
        return f"made by averaging the weights of {names}"
    return f"fine-tuned from {names}" if origin.ancestors else "trained"


def model_usage(model: Description) -> str:
    """How to use a model, in Markdown. The code runs in the folder of the model, whatever its name is."""
    is_joint = (model.folder / "joint.model").exists()
    return _render("usage.md", model, is_joint=is_joint, package=argos_package(model.config))


def argos_package(config: ModelFolderConfig) -> str:
    """The name of a package for Argos Translate, without the extension."""
    return f"translate-{argos_code(config.source_lang)}_{argos_code(config.target_lang)}"


def _render(template: str, model: Description, **facts: object) -> str:
    """Fill a template with what is known about a model, and with more facts. Text from outside is escaped by
    the filters `inline` and `code`."""
    config = model.config
    templates = load_templates(
        "mtrain.checkpoint",
        inline=_inline,
        code=_code,
        one_line=_one_line,
        argos_code=argos_code,
        number=_number,
        duration=format_duration,
    )
    return templates.get_template(template).render(
        model=model,
        info=model.info,
        config=config,
        architecture=config.model,
        tag=config.direction.tag(config.language_tags),
        home=_HOME,
        **facts,
    )


def _inline(text: str | None) -> str:
    """Text of one line without any markup."""
    return re.sub(r"([\\`*\[\]<>|#&])", r"\\\1", _one_line(text or ""))


def _code(text: str | None) -> str:
    """Text for a code span."""
    return _one_line((text or "").replace("`", "'"))


def _one_line(text: str) -> str:
    """Text without line breaks and other control characters."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def _number(value: int | None) -> str:
    return "" if value is None else f"{value:,}"
