"""Dispatch by measurement: a drop-in for PyTorch's attention that calls what a table of `attn-exp pick` picks."""

from attn_exp.dispatch.dispatcher import Dispatcher
from attn_exp.dispatch.load import load

__all__ = ["Dispatcher", "load"]
