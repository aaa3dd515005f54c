"""Hard inputs: values that expose wrong kernels which look right on a normal distribution.

Scores of normally distributed inputs are N(0, 1). Results hardly change if a kernel leaves out a softcap, the row's
maximum in the softmax or the mask of padding, or clamps scores. Here the keys of all heads have one structure, and each
query row picks a treatment (attn_exp/attention/hard_rows.py). So every tile and every part of a case meets all of a
kind's treatments.

The values of latent keys are their channels: only the parts of a kind that concern q and k apply to them.

The channels of q and k have four roles. *Offset* channels shift all scores of a row, *ramp* channels raise them from
key to key, *sink* channels raise those of a sequence's first key. The others hold random signs, in which a query finds
one pair of keys, twins of equal scores, as a needle.

Rows with large scores get their weights from exact ties and wide gaps. Formulas that round scores to the case's dtype
therefore agree with those that keep them in float32, and tolerances measured with them stay useful. Keys whose scores
nearly tie would differ: at a score of -400, bf16 rounds to multiples of two, which is a factor of e^2.
"""

import math
from dataclasses import dataclass, replace

import torch

from attn_exp.attention import hard_rows
from attn_exp.attention.hard_rows import Channels, Role, Rows, Treatment
from attn_exp.attention.inputs import Inputs, make_inputs, quantised
from attn_exp.attention.pages import as_cached
from attn_exp.attention.scores import biased
from attn_exp.core.case.case import E4M3, INT8, NORMAL, Case

# Magnitudes of k by role. At fp8 they are bounded by the scale of normal inputs, so offsets take more channels.
_SIGNS, _OFFSET = 1.0, 4.0
_SIGNS_FP8, _OFFSET_FP8 = 2.0, 4.0
# Channels of latent keys that are no values, from which on they have the roles that are the same in all keys.
_LEAST_BESIDE = 4
# Keys of zeros at the end of a cache.
_TAIL = 16
# One in so many channels is an outlier.
_OUTLIERS_EVERY = 16
# Rows of every second head get their treatment in runs of this length, so that whole tiles have one.
_RUN = 64


@dataclass(frozen=True)
class Kind:
    """A kind of inputs.

    Attributes:
        treatments: functions that make rows of q; each row gets one of them by chance.
        outliers: the magnitude of a few channels of k and v, relative to the others.
        values: factors, powers of two, of thirds of the channels of v and d_out: `unit`, `large` (one of them large,
            the other small, and the reverse), or `denormal`.
        same_keys: whether all keys are equal.
        padded: whether a quarter of the rows of v and d_out are zeros.
        zero_keys: whether some keys of every other head are zeros, like padding.
        decades: whether rows of d_out are multiplied by powers of two over four decades, in every other head.
        silent: whether d_out is zero in all heads of some tokens, as for tokens without a loss.
        faint: whether the first key of a sequence has no value, and the last keys are zeros, like the unused end of a
            cache. No mask hides these keys.
    """

    treatments: tuple[Treatment, ...] = (hard_rows.normal,)
    outliers: float = 1.0
    values: str = "unit"
    same_keys: bool = False
    padded: bool = False
    zero_keys: bool = False
    decades: bool = False
    silent: bool = False
    faint: bool = False


_MIXTURE = (
    *(hard_rows.sharp, hard_rows.sharp, hard_rows.sharp),
    *(hard_rows.needle, hard_rows.negative, hard_rows.positive, hard_rows.flat_negative),
    *(hard_rows.sink, hard_rows.rising, hard_rows.falling, hard_rows.edges, hard_rows.edges),
    hard_rows.zeros,
)
KINDS = {
    "sharp": Kind((hard_rows.sharp,)),
    "negative": Kind((hard_rows.negative, hard_rows.flat_negative)),
    "positive": Kind((hard_rows.positive,)),
    "abyss": Kind((hard_rows.abyss,)),
    "needles": Kind((hard_rows.needle, hard_rows.edges)),
    "sinks": Kind((hard_rows.sink,)),
    "ramps": Kind((hard_rows.rising, hard_rows.falling)),
    "outliers": Kind((hard_rows.normal, hard_rows.sharp), outliers=32.0),
    "constant": Kind(same_keys=True),
    "zeros": Kind((hard_rows.normal, hard_rows.zeros), padded=True),
    "large": Kind(values="large"),
    "denormal": Kind(values="denormal"),
    # The first key has nine tenths of the weight and no value: who drops small weights has nothing left.
    "faint": Kind((hard_rows.sink,), faint=True),
    "mixed": Kind(_MIXTURE, outliers=32.0, values="large", zero_keys=True, decades=True, silent=True),
}


def make_inputs_of(kind: str, case: Case, device: str, seed: int, *, with_gradients: bool) -> Inputs:
    """Return new inputs of a kind, `normal` or one of `KINDS`, from `seed`."""
    normal = make_inputs(case, device, seed, with_gradients=with_gradients)
    if kind == NORMAL:
        return normal
    made = draw(kind, case, torch.Generator(device).manual_seed(seed), like=normal)
    for tensor in made.qkv:
        tensor.requires_grad_(with_gradients)
    return replace(made, sink=normal.sink)


# Rows of the batch that are drawn; others repeat them, which bounds time and memory.
_DISTINCT = 4


@torch.no_grad()
def draw(kind: str, case: Case, generator: torch.Generator, *, like: Inputs) -> Inputs:
    """Return new inputs of a kind of `KINDS` with shapes, layout, dtype, device and scales of `like`.

    Rows of the batch after the fourth repeat the first four.
    """
    unfit = (*_NEGATIVE, *_LARGE) if biased(case) else _NEGATIVE if case.sink else ()
    kept = tuple(treatment for treatment in KINDS[kind].treatments if treatment not in unfit)
    chosen = replace(KINDS[kind], treatments=kept or (hard_rows.normal,))
    made = tuple(torch.empty_like(tensor.detach()) for tensor in (*like.qkv, like.d_out_bhsd))
    channels = _channels(case, chosen, generator, like.q_bhsd.device)
    distinct = min(case.batch, _DISTINCT)
    for name, whole, numbers in zip(_NAMES, made, _rows(case, distinct, chosen, channels, generator), strict=True):
        numbers = numbers.unflatten(0, (distinct, -1))
        by_row = (
            numbers.to(whole.dtype) if like.scales is None else quantised(numbers, getattr(like.scales, name)).codes
        )
        for first in range(0, case.batch, distinct):
            whole[first : first + distinct] = by_row[: case.batch - first]
    q, k, v, d_out = made
    for of_keys in (k, v):
        as_cached(case, of_keys)
    return Inputs(q, k, v, d_out, like.scales, kind, latent=case.latent)


# Nothing is left of rows of negative scores beside a learned sink.
_NEGATIVE = (hard_rows.negative, hard_rows.flat_negative, hard_rows.abyss)
# A bias that is added to one of two equal scores decides between them, and is lost if so large sums are rounded to 16
# bits. At 160, bf16 has whole numbers.
_LARGE = (hard_rows.positive, hard_rows.needle, hard_rows.edges)


_NAMES = ("q", "k", "v", "d_out")


def _channels(case: Case, kind: Kind, generator: torch.Generator, device: torch.device) -> Channels:
    """Give every channel its role, by chance."""
    dim = case.head_dim
    offsets = dim // 2 if case.in_codes else dim // 4
    other_count = max(1, dim // 16) if dim >= 4 else 0
    order = torch.randperm(dim, generator=generator, device=device)
    if case.latent and (beside := dim - case.value_dim) >= _LEAST_BESIDE:
        # Offsets are the same in all keys. As values they would be most of the output, and tell nothing.
        offsets, other_count = beside // 2, max(1, beside // 8)
        order = torch.cat([order[order >= case.value_dim], order[order < case.value_dim]])
    role = torch.empty(dim, device=device)
    role[order] = torch.arange(dim, device=device, dtype=role.dtype)
    bounds = (offsets, offsets + other_count, offsets + 2 * other_count, dim)
    roles, begin = [], 0
    for end in bounds:
        roles.append(Role(((role >= begin) & (role < end)).float(), end - begin))
        begin = end
    offset, ramp, sink, signs = roles
    unit, large = (_SIGNS_FP8, _OFFSET_FP8) if case.in_codes else (_SIGNS, _OFFSET)
    size = torch.where(signs.mask.bool(), unit, large)
    if kind.outliers > 1:
        apart = signs.mask.bool() & (role.long() % _OUTLIERS_EVERY == _OUTLIERS_EVERY - 1)
        # Within the scale of codes. At int8 the loss that outliers cause would hide all other mistakes of a mixture.
        within = case.in_codes or (case.quantised and kind == KINDS["mixed"])
        size = torch.where(apart, unit * (2.0 if within else kind.outliers), size)
    return Channels(offset, ramp, sink, signs, size, large)


def _rows(
    case: Case, batch: int, kind: Kind, channels: Channels, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q, k, v and d_out of rows of the batch, (batch * heads, length, dim) in float32."""
    device = channels.size.device
    q_heads, kv_heads = batch * case.q_heads, batch * case.kv_heads
    k = _keys(case, kv_heads, kind, channels, generator)
    # So many neighbouring rows get one treatment each, in random order: none is missing by chance.
    count, rows = len(kind.treatments), q_heads * case.q_len
    order = torch.rand(-(-rows // count), count, generator=generator, device=device).argsort(dim=-1)
    alone = order.flatten()[:rows].reshape(q_heads, case.q_len)
    in_runs = alone[:, :: min(_RUN, case.q_len)].repeat_interleave(min(_RUN, case.q_len), dim=1)[:, : case.q_len]
    odd = torch.arange(q_heads, device=device)[:, None] % case.q_heads % 2 == 1
    chosen = torch.where(odd, in_runs, alone).flatten()
    by_treatment = chosen.argsort(stable=True)
    q = torch.empty(rows, case.head_dim, device=device)
    counts = torch.bincount(chosen, minlength=count).tolist()
    for treatment, places in zip(kind.treatments, by_treatment.split(counts), strict=True):
        if len(places):
            heads, queries = places // case.q_len, places % case.q_len
            q[places] = treatment(Rows(case, channels, k, heads, queries, generator))
    if kind.zero_keys:
        hard_rows.zero_some(k, case.kv_heads, generator)

    def normal(heads: int, length: int) -> torch.Tensor:
        return torch.randn(heads, length, case.value_dim, generator=generator, device=device)

    v, d_out = normal(kv_heads, case.kv_len), normal(q_heads, case.q_len)
    if kind.faint:
        v[:, _starts(case, device).bool()] = 0.0
        k[:, case.kv_len - min(_TAIL, case.kv_len // 8) :] = 0.0
    by_channel = _magnitudes(case, kind, device)
    v, d_out = v * by_channel[0], d_out * by_channel[1]
    # Rounding a softcap's tanh changes weights by much, which does not average out over few large rows.
    if kind.decades and case.softcap is None:
        d_out *= _decades(case, q_heads, generator)
    if kind.silent:
        hard_rows.silence_some(d_out, generator)
    if kind.padded:
        v[:, 3::4], d_out[:, 3::4] = 0.0, 0.0
    return q.unflatten(0, (q_heads, case.q_len)), k, v, d_out


def _keys(case: Case, heads: int, kind: Kind, channels: Channels, generator: torch.Generator) -> torch.Tensor:
    """Return keys of so many heads, (heads, kv_len, head_dim) in float32."""
    device = channels.size.device
    shape = (heads, case.kv_len, case.head_dim)
    signs = torch.randint(2, shape, generator=generator, device=device, dtype=torch.int8).float() * 2 - 1
    # A key of an odd index differs from its twin before it in one of eight channels.
    differs = torch.arange(case.head_dim, device=device) % 8 == 0
    twins = torch.where(differs, -signs[:, ::2], signs[:, ::2])
    signs[:, 1::2] = twins[:, : signs[:, 1::2].shape[1]]
    if kind.same_keys:
        signs = signs[:, :1].expand(shape)
    place = torch.arange(case.kv_len, device=device)
    # Few levels, so that they are exact in every dtype.
    level = torch.floor(16 * place / case.kv_len) / 16
    starts = _starts(case, device)
    shared = channels.offset.mask + level[:, None] * channels.ramp.mask + starts[:, None] * channels.sink.mask
    return (shared + signs * channels.signs.mask) * channels.size


def _starts(case: Case, device: torch.device) -> torch.Tensor:
    """Return 1 for the first key of each sequence, else 0, (kv_len,)."""
    # One place more, where empty sequences behind the last key would start.
    starts = torch.zeros(case.kv_len + 1, device=device)
    starts[0] = 1.0
    if case.lengths is not None:
        starts[torch.tensor(case.kv_lengths or case.lengths, device=device).cumsum(0)[:-1]] = 1.0
    return starts[:-1]


def _magnitudes(case: Case, kind: Kind, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return factors of the channels of v and of d_out, (value_dim,)."""
    third = torch.arange(case.value_dim, device=device) % 3
    ones = torch.ones(case.value_dim, device=device)
    if kind.values == "denormal":
        tiny = _DENORMAL[case.dtype]
        return torch.where(third == 0, tiny, ones), torch.where(third == 1, tiny, ones)
    if kind.values == "large":
        of_v, of_d_out = _large(case)
        v = torch.where(third == 0, of_v, torch.where(third == 1, 1 / of_d_out, ones))
        return v, 1 / v
    every = torch.arange(case.value_dim, device=device) % _OUTLIERS_EVERY == 0
    return torch.where(every, kind.outliers, ones), ones


# The powers of two, from 0 down, that rows of d_out are multiplied by: four decades, and in fp16 what its numbers hold.
_OCTAVES = {"bfloat16": 14, "float32": 14, "float16": 5, E4M3: 1, INT8: 5}


def _decades(case: Case, heads: int, generator: torch.Generator) -> torch.Tensor:
    """Return factors of rows of d_out, (heads, q_len, 1); they are 1 in every other head of a row of the batch."""
    shape, device = (heads, case.q_len, 1), generator.device
    down = torch.randint(_OCTAVES[case.dtype], shape, generator=generator, device=device)
    apart = torch.arange(heads, device=device) % case.q_heads % 2 == 0
    return torch.exp2(-(down * apart[:, None, None]).float())


# A quarter of the smallest normal number; at fp8, relative to a scale of amax / 448.
_DENORMAL = {"bfloat16": 2.0**-128, "float32": 2.0**-128, "float16": 2.0**-16, E4M3: 2.0**-14, INT8: 2.0**-16}


def _large(case: Case) -> tuple[float, float]:
    """Return the factors of the large channels of v and of d_out, with which sums over rows stay finite."""
    if case.quantised:
        return 4.0, 4.0
    if case.dtype != "float16":
        return 2.0**30, 2.0**30
    # An output is as large as v. Gradients of v are sums of d_out over all queries: twenty standard deviations fit.
    queries = case.q_len * case.q_heads // case.kv_heads
    return 2.0**11, 2.0 ** max(0, int(math.log2(6e4 / (20 * queries**0.5))))
