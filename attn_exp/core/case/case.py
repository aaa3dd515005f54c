"""The case: shapes, dtype and mask of one attention problem, independent of the backend."""

from dataclasses import dataclass, replace

from attn_exp.core.case.features import APART, FEATURES, PAGES
from attn_exp.core.case.masks import KINDS, Causal, Full
from attn_exp.core.errors import UserError, nearest

E4M3 = "float8_e4m3fn"
# float16 tensors whose scores are products of int8 codes, which the backend makes inside of the call.
INT8 = "int8"
# Bytes of an element of q, k, v and the output.
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, E4M3: 1, INT8: 2}
# The short names of dtypes on the command line.
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp8": E4M3, "int8": INT8}
TYPED_DTYPES = {name: typed for typed, name in DTYPES.items()}
ALIGNMENTS = ("bottom_right", "top_left")
LAYOUTS = ("bhsd", "bshd")
# The computation around the attention. The first is attention without a block, None in a case.
WORKLOADS = ("attention", "dit_block", "dit_double_block", "decoder_layer")
# The passes that a backend computes and those that are measured: `step` is a forward and its backward in one call.
HALVES = ("forward", "backward")
PASSES = (*HALVES, "step")
# The kind of inputs that are normally distributed; conf/inputs has the others.
NORMAL = "normal"
# The kind of tensors that a user gave, of which nothing is known.
GIVEN = "given"

# A larger number is a typo, not an experiment.
LARGEST = {
    "batch": 1 << 20,
    "q_heads": 1 << 14,
    "kv_heads": 1 << 14,
    "q_len": 1 << 25,
    "kv_len": 1 << 25,
    "head_dim": 1 << 12,
    "value_dim": 1 << 12,
}
_LARGEST_TENSOR_BYTES = 1 << 40
_LARGEST_MLP = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Case:
    """One attention problem.

    Tensors are q (batch, q_heads, q_len, head_dim), k (batch, kv_heads, kv_len, head_dim) and v (batch, kv_heads,
    kv_len, value_dim); with `latent` v is a part of k.

    Attributes:
        batch: sequences, or rows of packed sequences.
        q_heads: query heads.
        kv_heads: key-value heads, a divisor of `q_heads`.
        q_len: queries.
        kv_len: keys.
        head_dim: the head dimension of q and k.
        value_dim: the head dimension of v and the output.
        dtype: PyTorch's name. Tensors of `float8_e4m3fn` are codes, each tensor with a scale
            (attn_exp/attention/inputs.py). At `int8` tensors are float16, and the backend quantises q and k inside of
            the call (attn_exp/attention/fused_formula.py).
        causal: whether a query sees only keys up to its own.
        align: where a causal mask starts if q_len != kv_len. `bottom_right`: the last query sees every key
            (FlashAttention >= 2.1). `top_left`: query i sees keys 0..i (PyTorch's `is_causal`).
        window: the keys that a sliding window keeps, the query's own included; it needs a causal mask. Libraries count
            differently (FlashAttention's left window L keeps L + 1 keys, cuDNN's keeps L), and backends translate.
        prefix: the first keys, which under a causal mask every query sees (prefix LM, arXiv:1910.10683, 3.2.1).
        chunk: under a causal mask a query sees only keys of its own chunk of so many positions (Llama 4's
            `attention_chunk_size`). The position of query i is that of the last key that it sees.
        block: under a causal mask a query also sees the later keys of its own block of so many positions: causal
            between blocks, full inside of them (diffusion language models, arXiv:2503.09573).
        softcap: bounds the scores before the mask: softcap * tanh(scores / softcap).
        sink: whether each query head has a learned logit that joins the softmax's denominator and has no value
            (gpt-oss, arXiv:2508.10925). Its values follow from the case (attn_exp/attention/scores.py), and its
            gradient, `d_sink`, is part of the backward.
        alibi: whether scores lose the distance of their query and key, times a slope of the query head (ALiBi,
            arXiv:2108.12409). It counts from the query's last key under a causal mask of this alignment.
        bias: the tensor that is added to scores, the same in all rows of the batch. `heads` has numbers for each query
            head (1, q_heads, q_len, kv_len); `shared` has the same for all heads (1, 1, q_len, kv_len). It is a
            constant (attn_exp/attention/scores.py).
        latent: whether the value of a key is its first `value_dim` channels, so that keys and values are one tensor. It
            is a cache of latents (multi-head latent attention in decoding, arXiv:2405.04434, 2.1.2), forward only.
        lengths: packs sequences of these lengths into one row of the batch. A query sees only keys of its own sequence,
            and masks count within it, prefixes and chunks too. One of 0 is a request without a query.
        kv_lengths: how many keys each of these sequences has, as many as queries or more: the requests of a batch in
            serving, whose last queries are new. None: as many as queries.
        page_size: how many keys each page of a paged cache has, from 1 to 256; None for keys and values that lie behind
            each other. The pages of a request or row lie anywhere in a pool (pages, page_size, kv_heads, head_dim or
            value_dim). A block table has their indices (attn_exp/attention/pages.py). It is forward only, and `layout`
            is that of q and the output.
        pages: where the pages of a paged cache lie in the pool: `shuffled`, `linear` (behind each other) or `shared`:
            shuffled, and all requests have the same pages for the first half of what the shortest one fills. None
            without pages.
        cache_dtype: `fp8` for a paged cache of e4m3 codes, with one scale for keys and one for values, that are known
            in advance, as in a server; None for a cache of the case's dtype.
        layout: the memory layout of tensors: `bhsd`, or `bshd` with the heads of a token adjacent.
        workload: the transformer block around the attention, q_heads x head_dim wide; None for attention without a
            block.
        mlp_dim: the width of the block's MLP; None without a block.

    Raises:
        UserError: a size is no positive integer or absurdly large, or the query heads are no multiple of the key-value
            heads. Likewise if a dtype, alignment, layout or workload is unknown, lengths do not add up, or the workload
            lacks a mask or head configuration.
    """

    batch: int
    q_heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    value_dim: int
    dtype: str
    causal: bool = False
    align: str = "bottom_right"
    window: int | None = None
    prefix: int | None = None
    chunk: int | None = None
    block: int | None = None
    softcap: float | None = None
    sink: bool = False
    alibi: bool = False
    bias: str | None = None
    latent: bool = False
    lengths: tuple[int, ...] | None = None
    kv_lengths: tuple[int, ...] | None = None
    page_size: int | None = None
    pages: str | None = None
    cache_dtype: str | None = None
    layout: str = "bhsd"
    workload: str | None = None
    mlp_dim: int | None = None

    def __post_init__(self) -> None:
        for name, largest in LARGEST.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= largest:
                typed = "null" if value is None else repr(value)
                raise UserError(f"{name}={typed} is not a whole number from 1 to {largest:,}")
        if self.q_heads % self.kv_heads:
            raise UserError(
                f"kv_heads={self.kv_heads} does not divide q_heads={self.q_heads}: "
                f"use model.kv_heads={nearest_divisor(self.q_heads, self.kv_heads)}, or another divisor"
            )
        if not isinstance(self.dtype, str) or self.dtype not in DTYPE_BYTES:
            raise UserError(f"dtype {self.dtype!r} is not one of {', '.join(DTYPE_BYTES)}")
        if not isinstance(self.causal, bool):
            raise UserError(f"causal={self.causal!r} is neither true nor false")
        if self.align not in ALIGNMENTS:
            raise UserError(f"align={self.align!r} is not one of {', '.join(ALIGNMENTS)}")
        self._check_mask()
        # Records that are older than the field had shuffled pages.
        object.__setattr__(self, "pages", None if self.page_size is None else self.pages or PAGES[0])
        object.__setattr__(self, "cache_dtype", None if self.page_size is None else self.cache_dtype)
        for field, feature in FEATURES.items():
            value = getattr(self, field)
            if value is not feature.absent and not feature.allows(value):
                raise UserError(f"{field}={value!r} is {feature.wrong}")
        if self.latent and self.value_dim > self.head_dim:
            raise UserError(
                f"latent=true has values that are channels of keys, and value_dim={self.value_dim} is more than "
                f"head_dim={self.head_dim}: set model.value_dim={self.head_dim} or less, or latent=false"
            )
        if self.layout not in LAYOUTS:
            raise UserError(f"layout={self.layout!r} is not one of {', '.join(LAYOUTS)}")
        if self.lengths is not None:
            self._check_lengths(self.lengths, self.kv_lengths)
        elif self.kv_lengths is not None:
            raise UserError("kv_lengths are those of packed sequences: set lengths too, or kv_lengths=null")
        if self.workload is not None:
            self._check_workload(self.workload)
        self._check_apart()
        tokens = self.batch * max(self.q_heads * self.q_len, self.kv_heads * self.kv_len)
        for tensor, numbers, remedy in (
            ("one tensor", tokens * max(self.head_dim, self.value_dim), "lower batch or seq_len"),
            ("the bias", self.bias_heads * self.q_len * self.kv_len, "lower seq_len, or set bias=shared"),
        ):
            size = numbers * DTYPE_BYTES[self.dtype]
            if size > _LARGEST_TENSOR_BYTES:
                raise UserError(f"{tensor} of this case takes {size / 2**40:.1f} TiB: {remedy}")

    def _check_mask(self) -> None:
        numbers = [(name, keys) for name in KINDS if (keys := getattr(self, name)) is not None]
        for name, keys in numbers:
            if not isinstance(keys, int) or isinstance(keys, bool) or keys < 1:
                raise UserError(f"{name}={keys!r} is not a positive number of keys; null is no {name}")
            if not self.causal:
                raise UserError(f"{name}={keys} {KINDS[name].does} a causal mask: set causal=true, or {name}=null")
        if len(numbers) > 1:
            (name, keys), (second, second_keys), *_ = numbers
            raise UserError(f"{name}={keys} and {second}={second_keys} are two masks: set {second}=null")

    def _check_lengths(self, lengths: tuple[int, ...], kv_lengths: tuple[int, ...] | None) -> None:
        for name, numbers in (("lengths", lengths), ("kv_lengths", kv_lengths)):
            if numbers is None:
                continue
            whole = all(isinstance(length, int) and not isinstance(length, bool) and length >= 0 for length in numbers)
            if not whole or not any(numbers):
                raise UserError(
                    f"{name}={list(numbers)} must be whole numbers, one of them positive, for example {name}=[512,1536]"
                )
        if kv_lengths is not None:
            self._check_requests(lengths, kv_lengths)
        if self.batch != 1 or self.q_len != sum(lengths) or self.kv_len != sum(kv_lengths or lengths):
            raise UserError(
                f"lengths={list(lengths)} pack {sum(lengths)} tokens into one row: set batch=1 and leave seq_len out"
            )

    def _check_apart(self) -> None:
        for field, others in APART.items():
            if not (value := getattr(self, field)):
                continue
            has_not = {name: feature.has_not() for name, feature in FEATURES.items()}
            has_not |= {"quantised": f"has no {TYPED_DTYPES[self.dtype]}: set dtype=bf16"}
            unset = "workload=attention" if field == "workload" else FEATURES[field].unset
            for other in others:
                if getattr(self, other):
                    typed = str(value).lower()
                    raise UserError(f"{field}={typed} {has_not[other]}, or {unset}")

    def _check_requests(self, lengths: tuple[int, ...], kv_lengths: tuple[int, ...]) -> None:
        if len(kv_lengths) != len(lengths):
            raise UserError(
                f"kv_lengths has {len(kv_lengths)} numbers, and lengths {len(lengths)}: one for each request"
            )
        for queries, keys in zip(lengths, kv_lengths, strict=True):
            if keys < queries:
                raise UserError(f"a request has {queries} queries and only {keys} keys, which include its own")
        if self.align != "bottom_right":
            raise UserError("requests end with their last key: set align=bottom_right")

    def _check_workload(self, workload: str) -> None:
        if workload not in WORKLOADS[1:]:
            near = nearest(workload, WORKLOADS)
            raise UserError(f"workload={workload} does not exist: {near}the choices are {', '.join(WORKLOADS)}")
        diffusion = workload in ("dit_block", "dit_double_block")
        checks = (
            (not (diffusion and self.causal), "has no causal mask: set causal=false, or choose model=flux"),
            (diffusion or self.causal, "has a causal mask: set causal=true, or choose workload=dit_block"),
            (
                not diffusion or self.q_heads == self.kv_heads,
                "has as many key-value heads as query heads: set model.kv_heads=null, or choose model=flux",
            ),
            (self.square, "attends to its own tokens: leave q_len and kv_len out, and set seq_len=..."),
            (
                workload != "dit_double_block" or self.q_len > 1,
                "has tokens of text and of an image: set seq_len=2 or more",
            ),
            (self.head_dim == self.value_dim, "has values as wide as its keys: set model.value_dim=null"),
            (self.head_dim % 2 == 0, "rotates pairs of dimensions: set an even model.head_dim"),
            (self.layout == LAYOUTS[0], "has tensors as its projections leave them: leave layout out"),
        )
        for fits, otherwise in checks:
            if not fits:
                raise UserError(f"workload={workload} {otherwise}")
        mlp = self.mlp_dim
        if mlp is None:
            raise UserError(f"workload={workload} needs its MLP's width: set mlp_dim=14336, or choose model=llama3_8b")
        if not isinstance(mlp, int) or isinstance(mlp, bool) or not 1 <= mlp <= _LARGEST_MLP:
            raise UserError(f"mlp_dim={mlp!r} is not a whole number from 1 to {_LARGEST_MLP:,}")

    @property
    def alone(self) -> "Case":
        """Return the attention without a block, with tensors as a block's projections leave them."""
        return self if self.workload is None else replace(self, layout="bshd", workload=None, mlp_dim=None)

    @property
    def in_codes(self) -> bool:
        """Whether tensors are codes with a scale."""
        return self.dtype == E4M3

    @property
    def quantised(self) -> bool:
        """Whether products are of codes of 8 bits: of the tensors, or of what the backend makes of them."""
        return self.dtype in (E4M3, INT8)

    @property
    def tensor_dtype(self) -> str:
        """Return PyTorch's name of the dtype that tensors have."""
        return "float16" if self.dtype == INT8 else self.dtype

    @property
    def embed_dim(self) -> int:
        """Return the width of all query heads together, as PyTorch's attention benchmark gives sizes."""
        return self.q_heads * self.head_dim

    @property
    def bias_heads(self) -> int:
        """Return how many heads of the bias there are, 0 without a bias."""
        return {None: 0, "shared": 1, "heads": self.q_heads}[self.bias]

    @property
    def forward_only(self) -> str | None:
        """Return why a case has no backward and what to set, None if it has one."""
        if self.latent:
            return "latent=true is measured forward only, as in decoding: set passes=[forward]"
        if self.page_size is not None:
            return "a paged cache is measured forward only, as in serving: set passes=[forward]"
        return None

    @property
    def shared_keys(self) -> int:
        """Return how many keys of each request lie in pages that all requests share."""
        if self.pages != "shared" or self.page_size is None or self.requests == 1:
            return 0
        shortest = min(self.kv_lengths or self.lengths or (self.kv_len,))
        return shortest // self.page_size // 2 * self.page_size

    @property
    def requests(self) -> int:
        """Return how many requests there are: packed sequences, or rows of the batch."""
        return self.batch if self.lengths is None else len(self.lengths)

    @property
    def empty_requests(self) -> bool | None:
        """Whether a packed sequence has no query or no key; None if all have some."""
        return (self.lengths is not None and 0 in self.lengths) or None

    @property
    def kv_dims(self) -> int:
        """Return the numbers that a key and its value have together."""
        return self.head_dim + (0 if self.latent else self.value_dim)

    @property
    def square(self) -> bool:
        """Whether both alignments are the same mask."""
        return self.q_len == self.kv_len and self.kv_lengths is None

    @property
    def offset(self) -> int:
        """Return the last key that query 0 sees under a causal mask."""
        return self.kv_len - self.q_len if self.align == "bottom_right" else 0

    @property
    def mask(self) -> Full:
        """Return the mask of each sequence."""
        for name, kind in KINDS.items():
            if (number := getattr(self, name)) is not None:
                return kind(number)
        return Causal() if self.causal else Full()

    @property
    def dense(self) -> bool:
        """Whether every query sees every key: no mask, or one that hides nothing, as in decoding."""
        if self.lengths is not None:
            return False
        first, end = self.mask.first, self.mask.end
        return (end is None or end.at(self.offset) >= self.kv_len) and (
            first is None or first.at(self.offset + self.q_len - 1) <= 0
        )

    @property
    def keyless(self) -> str | None:
        """Return which queries see no key, with a softmax of 0 / 0, and what to set instead; None if all see one."""
        first, end = self.mask.first, self.mask.end
        if end is not None and end.at(self.offset) <= 0:
            return "the first queries see no key, their softmax is undefined: set align=top_left or q_len <= kv_len"
        if first is not None and first.at(self.offset + self.q_len - 1) >= self.kv_len:
            return "the last queries see no key, their softmax is undefined: set a wider mask, or lower q_len"
        return None

    @property
    def most_keys(self) -> int:
        """Return how many keys a query sees at most: the last one of the longest sequence."""
        longest = max(self.kv_lengths or self.lengths or (self.kv_len,))
        return min(longest, self.window or longest, self.chunk or longest)

    def label(self) -> str:
        """Return a short label, e.g. `b8 h16 s1024 d128 bf16 causal`."""
        batch, heads, length, dim = self._sizes()
        return " ".join([batch, heads, length, dim, TYPED_DTYPES[self.dtype], self._mask(), *self._more()])

    def brief(self) -> str:
        """Return the label with what sweeps vary most first, e.g. `s1024 b8 causal h16 d128 bf16`."""
        batch, heads, length, dim = self._sizes()
        return " ".join([length, batch, self._mask(), heads, dim, TYPED_DTYPES[self.dtype], *self._more()])

    def shape(self) -> str:
        """Return the sizes of only the tensors, e.g. `b8 h16 s1024 d128`."""
        return " ".join(self._sizes())

    def _sizes(self) -> tuple[str, str, str, str]:
        heads = f"h{self.q_heads}" + (f"/{self.kv_heads}" if self.kv_heads != self.q_heads else "")
        length = f"s{self.q_len}" if self.square else f"q{self.q_len} kv{self.kv_len}"
        dim = f"d{self.head_dim}" + (f"/{self.value_dim}" if self.value_dim != self.head_dim else "")
        return f"b{self.batch}", heads, length, dim

    def _mask(self) -> str:
        mask = "causal" if self.causal else "full"
        if self.causal and not self.square:
            mask += f" {self.align}"
        more = [f"{kind.word}{keys}" for name, kind in KINDS.items() if (keys := getattr(self, name)) is not None]
        return " ".join([mask, *more])

    def _more(self) -> list[str]:
        more = []
        for field, feature in FEATURES.items():
            value = getattr(self, field)
            if feature.label and value and value != PAGES[0]:
                more.append(feature.label.format(value))
        if self.lengths is not None:
            more.append(f"{len(self.lengths)} {'packed' if self.kv_lengths is None else 'requests'}")
        more += [self.layout] if self.layout != LAYOUTS[0] else []
        return [*more, *([f"{self.workload} mlp{self.mlp_dim}"] if self.workload is not None else [])]


def nearest_divisor(whole: int, wanted: int) -> int:
    """Return the divisor of `whole` that is nearest to `wanted`, the smaller of two."""
    divisors = [d for d in range(1, whole + 1) if whole % d == 0]
    return min(divisors, key=lambda d: (abs(d - wanted), d))
