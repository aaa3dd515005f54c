"""Workloads: what is computed around the attention: nothing, or a transformer block."""

from attn_exp.core.case import Case
from attn_exp.workloads.attention import AttentionAlone
from attn_exp.workloads.base import Workload
from attn_exp.workloads.block import BlockWorkload
from attn_exp.workloads.decoder_layer import DecoderLayer
from attn_exp.workloads.dit_block import DitBlock


def workload_of(case: Case) -> Workload:
    """Return the workload of a case."""
    if case.workload is None:
        return AttentionAlone()
    return BlockWorkload({"dit_block": DitBlock, "decoder_layer": DecoderLayer}[case.workload])
