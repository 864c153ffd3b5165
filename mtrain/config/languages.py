"""Language codes, and what depends on the language."""

# Languages whose words 13a does not find: of those written without spaces it would count whole sentences.
_TOKENIZERS = {"zh": "zh", "ja": "ja-mecab", "ko": "ko-mecab"}


def base_language(code: str) -> str:
    """`zh` of a language code such as `zh`, `zh-TW` or `zh_CN`."""
    return code.lower().replace("_", "-").partition("-")[0]


def bleu_tokenizer(target_lang: str) -> str:
    """The sacreBLEU tokenizer for a language code."""
    return _TOKENIZERS.get(base_language(target_lang), "13a")
