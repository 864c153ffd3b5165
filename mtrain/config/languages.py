"""Language codes, and what depends on the language."""

from typing import TYPE_CHECKING, Any

from mtrain.errors import UsageError

if TYPE_CHECKING:
    from sacrebleu.metrics.bleu import BLEU

# For languages written without spaces, 13a would count whole sentences as words.
_BLEU_TOKENIZERS = {"zh": "zh", "ja": "ja-mecab", "ko": "ko-mecab"}


def base_language(code: str) -> str:
    """The language of a code without its region or script: `zh` for `zh`, `zh-TW` and `zh_CN`."""
    return code.lower().replace("_", "-").partition("-")[0]


def bleu_tokenizer(target_lang: str) -> str:
    """The name of sacreBLEU's tokenizer for a language code."""
    return _BLEU_TOKENIZERS.get(base_language(target_lang), "13a")


def make_bleu(tokenizer: str, **options: Any) -> "BLEU":
    """sacreBLEU's BLEU with one of its tokenizers and other options. Raises UsageError if a package that the
    tokenizer needs is not installed."""
    from sacrebleu.metrics.bleu import BLEU  # here: `mtrain --help` imports this file

    try:
        return BLEU(tokenize=tokenizer, **options)
    except (ImportError, RuntimeError, OSError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"the BLEU tokenizer {tokenizer} is not installed: {reason}") from None
