"""Style: colours and markers of backends, figures without pyplot, captions, and files."""

import importlib.util
import io
import re
import textwrap
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attn_exp.core.catalogue import About, backends, colour_of
from attn_exp.core.errors import UserError
from attn_exp.core.files import write_whole
from attn_exp.core.record.request import backend_label

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from attn_exp.results.result import Result

# Title and caption among a figure's texts.
_CAPTION = "caption"
MISSING = "plots need matplotlib, which is not installed: pip install matplotlib"
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*", "p", "h")
# The smallest letters, in points: 12 pixels where a plot is shown at its own size.
SMALL = 9
# The height of a title, in inches.
_TITLE = 0.29
# Captions and legends: letters per inch, and inches per line.
_CAPTION_LETTERS, _CAPTION_LINE, _LEGEND_LETTERS, _LEGEND_LINE, _HANDLE_LETTERS, _EDGE = 14.5, 0.16, 12.5, 0.2, 6, 0.08


@dataclass(frozen=True, slots=True)
class Look:
    """How one backend is drawn; a compiled one has a dashed line."""

    colour: str
    marker: str
    line: str = "-"


@dataclass(frozen=True)
class Chart:
    """A chart: `name` is its file's, `title` what it shows, `caption` what a reader must know.

    `below` is the height of the caption in inches.
    """

    name: str
    title: str
    caption: str
    figure: "Figure"
    below: float = 0.0

    def save(self, folder: str | Path) -> list[Path]:
        """Write the chart as NAME.svg and NAME.png into a folder and return their paths.

        Raises UserError if the folder cannot be written.
        """
        vector, pixels = (Path(folder) / f"{self.name}.{ending}" for ending in ("svg", "png"))
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            write_whole(vector, f'<?xml version="1.0" encoding="utf-8"?>\n{svg(self)}\n'.encode())
            write_whole(pixels, png(self.figure, dpi=100))
        except OSError as error:
            raise UserError(f"cannot write plots to {folder} ({error.strerror}): choose another folder") from error
        return [vector, pixels]

    def _repr_svg_(self) -> str:
        return svg(self)


def available() -> bool:
    """Return whether matplotlib is installed, without importing it."""
    return importlib.util.find_spec("matplotlib") is not None


def looks(results: Iterable["Result"]) -> dict[str, Look]:
    """Return the look of each label, which depends on its name only, unless two would look the same."""
    by_label_look: dict[str, Look] = {}
    by_label = {result.label: result for result in results}
    # The package's own backends choose first; others take another marker if theirs is taken.
    for label in sorted(by_label, key=lambda one: (one not in backends(), one)):
        result = by_label[label]
        name = str(result.backend.get("name", "?"))
        look = _look(name, backend_label(name, result.compile), result.about)
        # Take another marker; if all are taken, two labels look the same. A backend's own may be none of these.
        first = _MARKERS.index(look.marker) + 1 if look.marker in _MARKERS else 0
        others = iter((*_MARKERS[first:], *_MARKERS[:first]))
        for _ in _MARKERS:
            if look not in by_label_look.values():
                break
            look = Look(look.colour, next(others), look.line)
        by_label_look[label] = look
    return {label: by_label_look[label] for label in sorted(by_label_look)}


def _look(name: str, compiled: str, about: About) -> Look:
    colour = colour_of(name, about)
    # Not by the remainder that the colour is from: backends of one colour have several markers.
    marker = about.marker or _MARKERS[zlib.crc32(name.encode()) // 7 % len(_MARKERS)]
    if compiled == name:
        return Look(colour, marker)
    return Look(colour, _MARKERS[zlib.crc32(compiled.encode()) % len(_MARKERS)], "--")


def new_figure(width: float, height: float) -> "Figure":
    """Return a figure of this size in inches, without pyplot: no window system, no global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def finish(
    figure: "Figure", name: str, title: str, caption: str, handles: Sequence[Any] = (), labels: Sequence[str] = ()
) -> Chart:
    """Return the chart with title, legend and caption, with no text interpreted as mathematics."""
    from matplotlib.text import Text

    width, height = figure.get_size_inches()
    figure.suptitle(title, fontsize=12, fontweight="bold", gid=_CAPTION)
    lines = textwrap.wrap(caption, int(width * _CAPTION_LETTERS)) or [""]
    below, above = _CAPTION_LINE * len(lines) + _EDGE, 0.0
    figure.text(
        _EDGE / width, _EDGE / height, "\n".join(lines), fontsize=SMALL, color="#444444", va="bottom", gid=_CAPTION
    )
    if handles:
        # matplotlib omits labels that begin with an underscore.
        shown = [f" {label}" if label.startswith("_") else label for label in labels]
        columns = _columns([len(label) for label in shown], width * _LEGEND_LETTERS)
        figure.legend(
            handles, shown, ncols=columns, loc="upper center", bbox_to_anchor=(0.5, 1 - _TITLE / height),
            fontsize=SMALL, frameon=False, borderaxespad=0.2, handlelength=2.4, columnspacing=1.4,
        )  # fmt: skip
        # Above the panels: below many of them it would be out of sight.
        above = _LEGEND_LINE * -(-len(shown) // columns) + _EDGE
    for text in figure.findobj(Text):
        text.set_parse_math(False)
    engine = figure.get_layout_engine()
    assert engine is not None
    engine.set(rect=(0, below / height, 1, 1 - (below + above) / height))  # type: ignore[call-arg]
    # Laid out once; otherwise each file would repeat it. Not by a drawing without output, which takes as long again.
    engine.execute(figure)
    # Not "none", which leaves a placeholder for which each file would be drawn once more.
    figure.set_layout_engine(None)
    return Chart(name, title, caption, figure, below)


def _columns(lengths: Sequence[int], letters: float) -> int:
    """Return the number of columns in which a legend with labels of these lengths fits the line."""
    taken = [length + _HANDLE_LETTERS for length in lengths]
    return len(taken) if sum(taken) <= letters else max(1, min(len(taken), int(letters / max(taken))))


def handle(look: Look, **options: Any) -> Any:
    """Return the line or marker that stands for a look in a legend, without a line unless `options` have one."""
    from matplotlib.lines import Line2D

    kept: dict[str, Any] = {"linestyle": "none", "markersize": 6} | options
    return Line2D([], [], color=look.colour, marker=look.marker, **kept)


def log_ticks(axis: Any) -> None:
    """Set the ticks of a logarithmic axis, such that they remain useful over less than two decades."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    wide = high / low > 100
    axis.set_major_locator(LogLocator(10, subs=(1.0,) if wide else (1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def svg(chart: Chart, *, bare: bool = False) -> str:
    """Return the chart as one SVG element for a page with others: real text, no prolog, no clashing ids.

    A `bare` one is without title and caption, for a page that has them as its own text.
    """
    import matplotlib
    from matplotlib.transforms import Bbox

    buffer = io.StringIO()
    width, height = chart.figure.get_size_inches()
    # Not "tight", which draws everything once more.
    part: dict[str, Any] = {"bbox_inches": Bbox([[0, chart.below], [width, height - _TITLE]])} if bare else {}
    hidden = [text for text in chart.figure.texts if bare and text.get_gid() == _CAPTION]
    for line in hidden:
        line.set_visible(False)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": chart.name}):
        chart.figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None}, **part)
    for line in hidden:
        line.set_visible(True)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, count=1, flags=re.DOTALL)
    return re.sub(r"<g id=\"[a-zA-Z0-9_.]+\"", "<g", text).rstrip()


def png(figure: Any, dpi: int) -> bytes:
    """Return a figure as a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi)
    return buffer.getvalue()
