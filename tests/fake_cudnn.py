"""A stand-in for the `cudnn` package: it writes down what it is asked, and at fp8 computes what cuDNN documents."""

import itertools
import sys
from types import SimpleNamespace

import torch

from attn_exp.backends import cudnn_plan


def in_place_of_cudnn(monkeypatch):
    """Put it where an import finds it, with streams that are numbered from 100 on."""
    made = FakeCudnn()
    monkeypatch.setitem(sys.modules, "cudnn", made)
    monkeypatch.setattr(cudnn_plan, "_handle", lambda cudnn, device: "handle")
    streams = itertools.count(100)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=next(streams)))
    return made


_FORWARD_FP8 = {
    "name", "q", "k", "v", "descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o", "generate_stats",
}  # fmt: skip
_BACKWARD_FP8 = {
    "name", "q", "k", "v", "o", "dO", "stats", "descale_q", "descale_k", "descale_v", "descale_o", "descale_dO",
    "descale_s", "descale_dP", "scale_s", "scale_dQ", "scale_dK", "scale_dV", "scale_dP", "use_deterministic_algorithm",
}  # fmt: skip
_MASKS_FP8 = {
    "attn_scale", "use_padding_mask", "seq_len_q", "seq_len_kv", "diagonal_alignment", "left_bound", "right_bound",
    "max_total_seq_len_q", "max_total_seq_len_kv",
}  # fmt: skip


class FakeTensor:
    """A tensor of a graph: its uid, and what it was told."""

    def __init__(self, uid, **told):
        self.uid, self.told = uid, told

    def get_uid(self):
        return self.uid

    def __getattr__(self, name):
        if not name.startswith("set_"):
            raise AttributeError(name)
        return lambda value: self.told.update({name.removeprefix("set_"): value}) or self


class FakeGraph:
    """Writes down what it is asked; `execute` fills each output with its uid."""

    def __init__(self, cudnn, **precision):
        self.cudnn, self.steps, self.tensors, self.node = cudnn, [], {}, None
        self.selected_engine = cudnn.engine

    def _tensor(self, **told):
        made = FakeTensor(len(self.tensors) + 1, **told)
        self.tensors[made.uid] = made
        return made

    def tensor_like(self, like):
        return self._tensor(dim=list(like.shape), stride=list(like.stride()))

    def tensor(self, **told):
        return self._tensor(**told)

    def sdpa(self, **given):
        self.node = given
        return [self._tensor(), self._tensor() if given["generate_stats"] else None]

    def sdpa_backward(self, **given):
        self.node = given
        return [self._tensor() for _ in range(3)]

    def sdpa_fp8(self, **given):
        self.node = given
        assert set(given) <= _FORWARD_FP8 | _MASKS_FP8, "python/pygraph/sdpa.cpp does not know these names"
        return [self._tensor(), self._tensor() if given["generate_stats"] else None, self._tensor(), self._tensor()]

    def sdpa_fp8_backward(self, **given):
        self.node = given
        assert set(given) <= _BACKWARD_FP8 | _MASKS_FP8, "python/pygraph/sdpa.cpp does not know these names"
        return [self._tensor() for _ in range(7)]

    def check_support(self):
        self.steps.append("check_support")
        if self.cudnn.complaint:
            raise self.cudnn.complaint

    def get_workspace_size(self):
        return 4096

    def execute(self, variant_pack, workspace, handle):
        self.cudnn.runs.append((variant_pack, workspace, handle, self.cudnn.stream))
        if "descale_q" in self.node:
            self.compute_fp8(variant_pack)

    def compute_fp8(self, variant_pack):
        """What the nodes of include/cudnn_frontend/node compute, one after another: they scale and report amaxes."""
        asked = {name: told for name, told in self.node.items() if isinstance(told, torch.Tensor)}
        asked |= {name: variant_pack[told.uid] for name, told in self.node.items() if isinstance(told, FakeTensor)}
        written = [variant_pack[told.uid] for told in self.tensors.values() if "output" in told.told]
        causal = "diagonal_alignment" in self.node
        of = {name: asked[name].float() * asked[f"descale_{name}"] for name in asked if f"descale_{name}" in asked}
        group = of["q"].shape[1] // of["k"].shape[1]
        k, v = (of[name].repeat_interleave(group, 1) for name in "kv")
        scores = of["q"] @ k.mT * self.node["attn_scale"]
        if causal:
            scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), float("-inf"))
        codes = (torch.softmax(scores, -1) * asked["scale_s"]).to(torch.float8_e4m3fn)
        p = codes.float() * asked["descale_s"]

        def write(into, amax, numbers, scale):
            amax.copy_(numbers.abs().amax())
            into.copy_((numbers * scale).clamp(-448, 448).to(torch.float8_e4m3fn))

        if "dO" not in asked:
            out, *stats, _, amax = written
            write(out, amax, p @ v, asked["scale_o"])
            for room in stats:
                room.copy_(torch.logsumexp(scores, -1, keepdim=True))
            return
        *gradients, amax_ds = written
        exact = torch.exp(scores - asked["stats"])
        ds = exact * (of["dO"] @ v.mT - (of["dO"] * of["o"]).sum(-1, keepdim=True))
        ds_codes = torch.empty(ds.shape, dtype=torch.float8_e4m3fn)
        write(ds_codes, amax_ds, ds, asked["scale_dP"])
        ds = ds_codes.float() * asked["descale_dP"] * self.node["attn_scale"]
        made = {"Q": ds @ k, "K": ds.mT @ of["q"], "V": p.mT @ of["dO"]}
        for at, (name, numbers) in enumerate(made.items()):
            if name != "Q":
                numbers = numbers.unflatten(1, (-1, group)).sum(2)
            write(gradients[at], gradients[3 + at], numbers, asked[f"scale_d{name}"])

    def __getattr__(self, name):
        return lambda *arguments: self.steps.append(name)


class FakeWrapper:
    """`cudnn.Graph` as far as it is used: a graph in a block, called with a dict."""

    def __init__(self, cudnn, *, handle, workspace_alloc, **precision):
        assert not workspace_alloc
        self.graph = FakeGraph(cudnn)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.graph.check_support()

    def __call__(self, buffers, workspace, handle):
        self.graph.execute(buffers, workspace, handle)

    def __getattr__(self, name):
        return getattr(self.graph, name)


class FakeCudnn:
    """The module: one graph after another, and every run with the stream that was set for it."""

    cudnnGraphNotSupportedError = type("cudnnGraphNotSupportedError", (Exception,), {})
    data_type = SimpleNamespace(HALF="half", FLOAT="float", BFLOAT16="bfloat16", INT32="int32", FP8_E4M3="e4m3")
    heur_mode = SimpleNamespace(A="A", FALLBACK="FALLBACK")
    diagonal_alignment = SimpleNamespace(TOP_LEFT="top left", BOTTOM_RIGHT="bottom right")

    def __init__(self, engine=None, complaint=None):
        self.engine, self.complaint = engine, complaint
        self.graphs, self.runs, self.stream = [], [], None

    def backend_version(self):
        return 91900

    def pygraph(self, **options):
        self.graphs.append(FakeGraph(self, **options))
        return self.graphs[-1]

    def Graph(self, **options):
        wrapper = FakeWrapper(self, **options)
        self.graphs.append(wrapper.graph)
        return wrapper

    def set_stream(self, handle, stream):
        self.stream = stream
