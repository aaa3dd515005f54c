"""Second opinions in words: which timers of which job disagree, and by how much."""

from collections.abc import Iterable

from attn_exp.results.result import Result

_SHOWN = 5


def opinion_notes(results: Iterable[Result]) -> list[str]:
    """Return a sentence for each of the first pairs of timers that disagree, and how many there are beside them."""
    every = list({id(one): one for one in results if one.second_opinions}.values())
    sentences = [
        f"timers disagree, {one.label} {one.case.label()}, {words}" for one in every for words in one.second_opinions
    ]
    rest = len(sentences) - _SHOWN
    more = [f"... and {rest} more pairs of timers disagree: second_opinions in table.csv has all"] if rest > 0 else []
    return sentences[:_SHOWN] + more
