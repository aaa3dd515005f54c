"""Counts the operators of a call on a CPU that compute attention: what a call leaves out, or does early, shows there.

Counts do not depend on how busy a machine is, as times do. A kernel of a library's own that is no operator of PyTorch's
is not seen.
"""

import re
from collections import Counter

from attn_exp.timers.operators import operators
from attn_exp.timers.timed_call import Call

# Matrix products, exponentials and whole attentions; nested ones count as well.
_COUNTED = re.compile(r"aten::(_?scaled_dot_product\w+|_?softmax|logsumexp|matmul|b?mm|addb?mm|baddbmm|exp2?_?)")


def products(call: Call) -> Counter[str]:
    """Return how often a call runs each operator that computes attention."""
    traced = operators(call)
    return Counter(one.name for made in traced.calls for one in made.activities if _COUNTED.fullmatch(one.name))


def more_often(found: Counter[str], before: Counter[str]) -> str | None:
    """Return which operators ran more often than before as words, or None."""
    more = {name: (count, before[name]) for name, count in found.items() if count > before[name]}
    if not more:
        return None
    return ", ".join(f"{name} {count} times instead of {least}" for name, (count, least) in sorted(more.items())[:2])
