"""Text templates in the language of Jinja."""

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jinja2 import Environment


@cache  # so that each template is compiled once
def load_templates(package: str, **filters: Callable[..., str]) -> "Environment":
    """The templates in the folder templates/ of a package, and the `filters` that they use besides Jinja's
    own. Values are not escaped, unless a filter does so. A line with nothing but a tag adds nothing to the
    text. Unknown names are errors."""
    from jinja2 import Environment, PackageLoader, StrictUndefined  # here: few commands need it

    templates = Environment(
        loader=PackageLoader(package),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
    )
    templates.filters |= filters
    return templates
