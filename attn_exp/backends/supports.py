"""Declare once what a backend can compute; refusals, `attn-exp backends` and the docs are derived from it."""

from dataclasses import dataclass
from typing import Literal

from attn_exp.core.case.case import ALIGNMENTS, HALVES, TYPED_DTYPES, Case
from attn_exp.core.case.features import EVERY_FEATURE, FEATURES
from attn_exp.core.case.masks import KINDS

_OTHERS = "or see attn-exp backends"
DEVICES = {"cuda": "NVIDIA GPUs", "cpu": "the CPU"}


@dataclass(frozen=True, kw_only=True)
class Supports:
    """Capabilities of a backend.

    Attributes:
        devices: `cuda`, `cpu`.
        dtypes: dtypes of the inputs.
        passes: `forward`, `backward`.
        forward_only: dtypes without a backward.
        align: the causal alignments that it supports where q_len != kv_len.
        grouped: fewer key-value heads than query heads.
        masks: the kinds of masks with a number, by the case's field (attn_exp/core/case/masks.py).
        features: the scores, caches and packed sequences, by the names in attn_exp/core/case/features.py.
        page_sizes: all page sizes there are; None for any.
        keyless: zeros for queries that see no key.
        head_dims: all head dimensions there are; None for every multiple of `head_dim_multiple` up to
            `largest_head_dim`.
        value_dims: which pairs (head_dim, value_dim) may differ: `equal` for none, `any`, or the pairs.
        capability: the least CUDA compute capability.
        capabilities: the only major compute capabilities that have code.
    """

    devices: tuple[str, ...] = ("cuda",)
    dtypes: tuple[str, ...] = ("bfloat16", "float16")
    passes: tuple[str, ...] = HALVES
    forward_only: tuple[str, ...] = ()
    align: tuple[str, ...] = ALIGNMENTS
    grouped: bool = True
    masks: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    page_sizes: tuple[int, ...] | None = None
    keyless: bool = False
    head_dims: tuple[int, ...] | None = None
    largest_head_dim: int | None = None
    head_dim_multiple: int = 1
    value_dims: Literal["equal", "any"] | tuple[tuple[int, int], ...] = "equal"
    capability: tuple[int, int] | None = None
    capabilities: tuple[int, ...] | None = None

    def passes_at(self, dtype: str) -> tuple[str, ...]:
        """Return the passes for inputs of a dtype."""
        return ("forward",) if dtype in self.forward_only else self.passes

    def summary(self) -> str:
        """Return in a few words what can be computed."""
        words = ["/".join(TYPED_DTYPES.get(name, name) for name in self.dtypes)]
        if self.devices == ("cuda",):
            words.append("GPU")
        if self.head_dims is not None:
            words.append("d " + "/".join(map(str, self.head_dims)))
        elif self.largest_head_dim is not None:
            words.append(f"d <= {self.largest_head_dim}")
        if self.value_dims != "equal":
            pairs = "d_qk != d_v" if self.value_dims == "any" else " ".join(f"{q}/{v}" for q, v in self.value_dims)
            words.append(pairs)
        words += ["grouped heads"] if self.grouped else []
        words += ["q != kv " + " or ".join(name.replace("_", "-") for name in self.align)] if self.align else []
        words += self.masks
        words += [name.replace("_", " ") for name in EVERY_FEATURE if name in self.features]
        words += ["forward only"] if self.passes == ("forward",) else []
        words += [f"{TYPED_DTYPES.get(name, name)} forward only" for name in self.forward_only]
        if self.capability or self.capabilities:
            words.append(f"sm >= {'.'.join(map(str, self.capability))}" if self.capability else "")
            words.append(f"sm {'/'.join(f'{major}x' for major in self.capabilities)}" if self.capabilities else "")
        return ", ".join(filter(None, words))

    def refusal(self, case: Case, device: str) -> str | None:
        """Return why a case is not supported, in one sentence that says what to set instead; None if it is."""
        checks = (
            (device in self.devices, f"runs only on {DEVICES[self.devices[0]]}: see attn-exp backends"),
            (case.dtype in self.dtypes, f"computes {_words(self.dtypes)}, not {case.dtype}"),
            (self.grouped or case.q_heads == case.kv_heads, "has no grouped heads: set model.kv_heads=null"),
            (
                case.dense or case.square or case.align in self.align or case.kv_lengths is not None,
                f"aligns a causal mask {_words(self.align)}: set align={self.align[0]}"
                if self.align
                else f"has a causal mask only for as many keys as queries, {_OTHERS}",
            ),
            *(
                # A mask that hides nothing is none.
                (
                    name in self.masks or not getattr(case, name) or case.dense,
                    f"has no {kind.lacking}: set {name}=null, {_OTHERS}",
                )
                for name, kind in KINDS.items()
            ),
            *(
                (feature.name in (None, *self.features) or not getattr(case, field), f"{feature.has_not()}, {_OTHERS}")
                for field, feature in FEATURES.items()
            ),
            (
                self.page_sizes is None or case.page_size is None or case.page_size in self.page_sizes,
                f"has pages of {_words(self.page_sizes or ())} keys, not {case.page_size}: "
                f"set page_size={(self.page_sizes or ('null',))[0]}",
            ),
        )
        for fits, refusal in checks:
            if not fits:
                return refusal
        return (None if self.keyless else case.keyless) or self._dims_refusal(case)

    def _dims_refusal(self, case: Case) -> str | None:
        dims = (case.head_dim, case.value_dim)
        if case.head_dim != case.value_dim:
            if self.value_dims == "equal":
                return f"needs equal head dimensions, not {case.head_dim} and {case.value_dim}"
            if not isinstance(self.value_dims, str):
                if dims in self.value_dims:
                    return None
                pairs = ", ".join(f"{query} and {value}" for query, value in self.value_dims)
                return f"takes different head dimensions only of {pairs}, not {case.head_dim} and {case.value_dim}"
        for dim in dims:
            if self.head_dims is not None and dim not in self.head_dims:
                return f"has head dimensions {_words(self.head_dims)}, not {dim}"
            if self.largest_head_dim is not None and dim > self.largest_head_dim:
                return f"has head dimensions up to {self.largest_head_dim}, not {dim}"
            if dim % self.head_dim_multiple:
                return f"needs head dimensions that are multiples of {self.head_dim_multiple}, not {dim}"
        return None

    def capability_refusal(self, capability: tuple[int, int]) -> str | None:
        """Return why a GPU of this compute capability is not supported, or None."""
        have = ".".join(map(str, capability))
        if self.capability is not None and capability < self.capability:
            return f"needs compute capability {'.'.join(map(str, self.capability))}, this GPU has {have}"
        if self.capabilities is not None and capability[0] not in self.capabilities:
            return f"is built for compute capability {_words(self.capabilities)}.x, this GPU has {have}"
        return None


def _words(values: tuple[object, ...]) -> str:
    return " or ".join(str(value) for value in values)
