"""The picture of a page: the roofline, with the jobs on the same case beside the one that is explained."""

from pathlib import Path

from attn_exp.charts.roofline import roofline_chart
from attn_exp.charts.style import MISSING, available, save
from attn_exp.compare.grouping import way
from attn_exp.errors import UserError
from attn_exp.explain.find import Found
from attn_exp.record import RecordError
from attn_exp.roofline import Roof, roof_of


def write_picture(found: Found, folder: Path) -> list[Path]:
    """Write `roofline.svg` and `.png` into `folder`; their paths, none where there is no rate to draw.

    Raises:
        UserError: there is no matplotlib, or the folder cannot be written.
    """
    if not available():
        raise UserError(MISSING)
    job = found.job
    shown = [one for one in found.results if job is None or (one.case, way(one)) == (job.case, way(job))]
    # The last is the one whose device and data type count.
    chart = roofline_chart([*(one for one in shown if one is not job), *([job] if job else [])], _measured(found))
    if chart is None:
        return []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return save(chart, folder)
    except OSError as error:
        raise UserError(f"cannot write to {folder} ({error.strerror}): choose another with plots=FOLDER") from error


def _measured(found: Found) -> dict[str, Roof]:
    """By pass, where a job stands by the bytes that DRAM really moved."""
    if found.job is None:
        return {}
    try:
        record = found.job.record()
    except RecordError:
        return {}
    roofs = {direction: roof_of(record, direction) for direction in record.request.measuring.passes}
    return {direction: roof for direction, roof in roofs.items() if roof is not None and roof.measured}
