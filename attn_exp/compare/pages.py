"""Pages: each kind of comparison as the sheets, lines and notes that every output shows."""

from attn_exp.compare.changes import Changes
from attn_exp.compare.comparison import Comparison
from attn_exp.compare.history import History
from attn_exp.compare.page_changes import changes_page
from attn_exp.compare.page_details import detailed
from attn_exp.compare.page_history import history_page
from attn_exp.compare.page_published import published_page
from attn_exp.compare.page_rivals import rivals_page
from attn_exp.compare.published import Published
from attn_exp.compare.rivals import Rivals
from attn_exp.compare.sheet import Page


def page(found: Comparison) -> Page:
    """The page of a comparison of any kind."""
    if isinstance(found, Rivals):
        own = rivals_page(found)
    elif isinstance(found, Changes):
        own = changes_page(found)
    elif isinstance(found, History):
        own = history_page(found)
    elif isinstance(found, Published):
        own = published_page(found)
    else:
        raise TypeError(f"there is no page for {type(found).__name__}")
    return detailed(own, found, [row.cell for row in found.rows])
