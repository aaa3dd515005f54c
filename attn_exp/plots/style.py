"""Style: who has which colour and marker, figures without pyplot, captions, and files."""

import importlib.util
import io
import re
import textwrap
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attn_exp.core.catalogue import About, backends
from attn_exp.core.record import backend_label

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from attn_exp.results.result import Result

MISSING = "plots need matplotlib, which is not installed: pip install matplotlib"
# Okabe and Ito's colours, told apart by the colour-blind too; their yellow is left out, too faint on white.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*", "p", "h")
# Of captions in letters of 8 points and legends in letters of 9: letters an inch, and inches a line.
_CAPTION_LETTERS, _CAPTION_LINE, _LEGEND_LETTERS, _LEGEND_LINE, _HANDLE_LETTERS, _EDGE = 16.5, 0.14, 12.5, 0.2, 6, 0.08


@dataclass(frozen=True, slots=True)
class Look:
    """How one backend is drawn; what is compiled has a dashed line."""

    colour: str
    marker: str
    line: str = "-"


@dataclass(frozen=True)
class Chart:
    """A picture: `name` is its file's, `title` what it shows, `caption` what one must know to read it."""

    name: str
    title: str
    caption: str
    figure: "Figure"


def available() -> bool:
    """Whether there is a matplotlib to draw with; without importing it."""
    return importlib.util.find_spec("matplotlib") is not None


def looks(results: Iterable["Result"]) -> dict[str, Look]:
    """The look of each label, by its name alone unless two would look the same; labels in their order."""
    found: dict[str, Look] = {}
    by_label = {result.label: result for result in results}
    # Backends that come with the package, uncompiled, choose first: the others take another marker if theirs is taken.
    for label in sorted(by_label, key=lambda one: (one not in backends(), one)):
        result = by_label[label]
        name = str(result.backend.get("name", "?"))
        look = _look(name, backend_label(name, result.compile), result.about)
        # Another marker if it is taken; with all of them taken, two labels look the same.
        for _ in _MARKERS:
            if look not in found.values():
                break
            after = _MARKERS[(_MARKERS.index(look.marker) + 1) % len(_MARKERS)]
            look = Look(look.colour, after, look.line)
        found[label] = look
    return {label: found[label] for label in sorted(found)}


def _look(name: str, compiled: str, about: About) -> Look:
    number = zlib.crc32(name.encode())
    colour = about.colour or _COLOURS[number % len(_COLOURS)]
    marker = about.marker or _MARKERS[number // 7 % len(_MARKERS)]
    if compiled == name:
        return Look(colour, marker)
    return Look(colour, _MARKERS[zlib.crc32(compiled.encode()) % len(_MARKERS)], "--")


def new_figure(width: float, height: float) -> "Figure":
    """A figure in inches, without pyplot: no window system, no global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def finish(
    figure: "Figure", name: str, title: str, caption: str, handles: Sequence[Any] = (), labels: Sequence[str] = ()
) -> Chart:
    """The chart: title above, legend and caption below, nothing that came from a record read as mathematics."""
    from matplotlib.text import Text

    width, height = figure.get_size_inches()
    figure.suptitle(title, fontsize=12, fontweight="bold")
    lines = textwrap.wrap(caption, int(width * _CAPTION_LETTERS)) or [""]
    below = _CAPTION_LINE * len(lines) + _EDGE
    figure.text(_EDGE / width, _EDGE / height, "\n".join(lines), fontsize=8, color="#444444", va="bottom")
    if handles:
        # matplotlib leaves out what begins with an underscore.
        shown = [f" {label}" if label.startswith("_") else label for label in labels]
        columns = _columns([len(label) for label in shown], width * _LEGEND_LETTERS)
        figure.legend(
            handles, shown, loc="lower center", bbox_to_anchor=(0.5, below / height), ncols=columns, fontsize=9,
            frameon=False, borderaxespad=0.2, handlelength=2.4, columnspacing=1.4,
        )  # fmt: skip
        below += _LEGEND_LINE * -(-len(shown) // columns) + _EDGE
    for text in figure.findobj(Text):
        text.set_parse_math(False)
    engine = figure.get_layout_engine()
    assert engine is not None
    engine.set(rect=(0, below / height, 1, 1 - below / height))  # type: ignore[call-arg]
    # Laid out once: each of the files would do it again.
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    return Chart(name, title, caption, figure)


def _columns(lengths: Sequence[int], letters: float) -> int:
    """How many columns a legend of such labels has so that it fits into a line of so many letters."""
    taken = [length + _HANDLE_LETTERS for length in lengths]
    return len(taken) if sum(taken) <= letters else max(1, min(len(taken), int(letters / max(taken))))


def svg(chart: Chart) -> str:
    """The chart as one SVG element, to stand in a page with others: real text, no prolog, no ids that would clash."""
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": chart.name}):
        chart.figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, count=1, flags=re.DOTALL)
    return re.sub(r"<g id=\"[a-zA-Z0-9_.]+\"", "<g", text).rstrip()


def save(chart: Chart, folder: Path) -> list[Path]:
    """Write the chart as NAME.svg and NAME.png; their paths."""
    vector, pixels = folder / f"{chart.name}.svg", folder / f"{chart.name}.png"
    vector.write_text(f'<?xml version="1.0" encoding="utf-8"?>\n{svg(chart)}\n', encoding="utf-8")
    chart.figure.savefig(pixels, dpi=100)
    return [vector, pixels]
