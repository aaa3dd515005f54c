"""Data frames. pandas is imported here and nowhere else, when a caller asks for one."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attn_exp.core.errors import UserError

if TYPE_CHECKING:
    import pandas


def frame(rows: Sequence[Mapping[str, Any]]) -> "pandas.DataFrame":
    """Return rows as a pandas DataFrame. Raises UserError if pandas is not installed."""
    try:
        import pandas
    except ImportError as error:
        raise UserError("data frames need pandas, which is not installed: pip install pandas") from error
    return pandas.DataFrame(list(rows))
