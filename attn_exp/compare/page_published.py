"""The page of published figures beside ours."""

from attn_exp.compare.page_parts import about_part, case_part, case_values, head_lines, shared_line
from attn_exp.compare.published import Published
from attn_exp.compare.sheet import Column, Page, Sheet

_YES_NO = {True: "yes", False: "no", None: "unknown"}


def published_page(found: Published) -> Page:
    """A row for each of our cells beside each figure of its shape."""
    shared, case = case_part([row.cell for row in found.rows])
    columns = (
        *case,
        Column("pass", "pass"),
        Column("backend", "ours"),
        Column("tflops", "ours TFLOPS", "figure"),
        Column("library", "published"),
        Column("version", "version", spare=2),
        Column("published_tflops", "their TFLOPS", "figure"),
        Column("ratio", "ratio", "ratio"),
        Column("published_gpu", "their GPU", spare=1),
        Column("gpu", ""),
        Column("same_gpu", "same GPU"),
        Column("same_library", ""),
        Column("source", ""),
        Column("job", ""),
    )
    rows = tuple(
        (
            *case_values(row.cell),
            row.cell.direction,
            row.cell.result.label,
            row.tflops,
            row.figure.library,
            row.figure.version,
            row.figure.tflops,
            row.ratio,
            row.figure.gpu,
            row.cell.result.device_name,
            _YES_NO[row.same_gpu],
            row.same_library,
            row.figure.source,
            row.cell.result.job,
        )
        for row in found.rows
    )
    about = about_part(found) | {"kind": "published", "figures": found.figures, "shared": shared}
    lines = (
        *head_lines(found),
        shared_line(shared),
        f"{len({id(row.figure) for row in found.rows})} of {found.figures} figures are of a shape measured here",
    )
    return Page(about, lines, (Sheet("rows", "", columns, rows),), found.notes)
