"""Workloads: what is computed around the attention: nothing, or a transformer block."""

from attn_exp.core.case.case import Case
from attn_exp.workloads.base import AttentionAlone, Workload
from attn_exp.workloads.block import BlockWorkload
from attn_exp.workloads.decoder_layer import DecoderLayer
from attn_exp.workloads.dit_block import DitBlock
from attn_exp.workloads.dit_double_block import DitDoubleBlock


def workload_of(case: Case) -> Workload:
    """Return the workload of a case."""
    if case.workload is None:
        return AttentionAlone()
    kinds = {"dit_block": DitBlock, "dit_double_block": DitDoubleBlock, "decoder_layer": DecoderLayer}
    return BlockWorkload(kinds[case.workload])
