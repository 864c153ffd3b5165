"""Write the config reference of the README from the typed config: `python scripts/config_reference.py`."""

import json
import re
from pathlib import Path
from typing import Any

from mtrain.config import schema

README = Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- config reference: begin -->", "<!-- config reference: end -->"
SECTIONS = {
    "Top level": schema.Config,
    "`data`": schema.DataConfig,
    "A corpus of two text files": schema.TextCorpus,
    "A corpus in a TSV file": schema.TsvCorpus,
    "A corpus in a JSONL file": schema.JsonlCorpus,
    "A corpus in Parquet files": schema.ParquetCorpus,
    "A corpus of the Hugging Face hub": schema.HubCorpus,
    "The bundled corpus": schema.ToyCorpus,
    "`data.validation`, held out": schema.Holdout,
    "`tokenizer`": schema.TokenizerConfig,
    "`model`": schema.Architecture,
    "`training`": schema.TrainingConfig,
    "`decoding`": schema.DecodingConfig,
    "`export`": schema.ExportConfig,
}
SIGNS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
TYPES = {
    "string": "text",
    "boolean": "`true`, `false`",
    "array": "list",
    "object": "section",
    "null": "`null`",
}


def values_of(field: dict[str, Any]) -> str:
    """What a field may be, from its JSON schema."""
    if "enum" in field or "const" in field:
        return ", ".join(f"`{choice}`" for choice in field.get("enum", [field.get("const")]))
    if "anyOf" in field:
        return " or ".join(values_of(part) for part in field["anyOf"])
    if "oneOf" in field or "$ref" in field:
        return "section"
    if "enum" in field.get("items", {}):
        return f"list of {values_of(field['items'])}"
    limits = [f"{sign} {field[key]}" for key, sign in SIGNS.items() if key in field]
    return " ".join([TYPES.get(field["type"], field["type"]), ", ".join(limits)]).strip()


def reference() -> str:
    """The whole reference as Markdown tables."""
    parts = []
    for title, section in SECTIONS.items():
        fields = section.model_json_schema()
        lines = [title, "", "| key | default | values | meaning |", "|---|---|---|---|"]
        for name, field in fields["properties"].items():
            simple = isinstance(field.get("default"), (str, int, float, list, type(None)))
            default = json.dumps(field.get("default")).strip('"') if simple else "{}"
            shown = "required" if name in fields.get("required", []) else f"`{default}`"
            lines.append(f"| `{name}` | {shown} | {values_of(field)} | {field['description']} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def updated(readme: str) -> str:
    """The README with the reference between its marks made anew."""
    block = f"{BEGIN}\n{reference()}\n{END}"
    return re.sub(f"{re.escape(BEGIN)}.*{re.escape(END)}", lambda _: block, readme, flags=re.DOTALL)


if __name__ == "__main__":
    README.write_text(updated(README.read_text(encoding="utf-8")), encoding="utf-8")
