"""Write a find as a program of at most 40 lines that needs torch and the backend's library, and not this package.

It computes the example on the library's public function and in float64 by the formula, prints the error, and exits with
1 if it is larger than allowed, else with 0.
"""

import base64
import zlib

import torch

from attn_exp.attention.biases import LAST_SHIFT, MIXES, OF_HEAD, OF_KEY, OF_QUERY, alibi_slopes, biased
from attn_exp.attention.inputs import DifferentiableInputs, Inputs
from attn_exp.backends.base import Backend
from attn_exp.core.case import TYPED_DTYPES, Case
from attn_exp.core.hunting import KINDS, Example, Outcome, Script
from attn_exp.hunt.library_calls import source
from attn_exp.hunt.values import inputs_of, places_of, spread_axis, step_of

MOST_LINES = 40
_WIDTH = 150
# Values that are written into the program, as letters.
_MOST_TEXT = 200_000
# What the lines of `_errors` need.
_IMPORTS = {"worst_tile": ["import torch.nn.functional as F"]}
_GRADIENTS = ("dq", "dk", "dv")


class Unwritable(Exception):
    """The values of an example do not fit into a program."""


def script_of(backend: Backend, example: Example, outcome: Outcome, device: str) -> Script:
    """Return the script of an example with this outcome."""
    case = example.case
    if case.quantised:
        return Script(text="", why_not=f"scripts of {TYPED_DTYPES[case.dtype]} are not written: run the overrides")
    if case.sink:
        return Script(text="", why_not="scripts of sinks are not written: run the overrides")
    inputs = inputs_of(example, device)
    calls = backend.prepare(case, inputs)
    call = source(backend, case, calls.attention)
    layout = _layout(calls.inputs, case)
    head = [
        f'"""{backend.name}: {_one_line(outcome.reason or outcome.status)}',
        f"{example.label()}, torch {torch.__version__}, {device}. Exits with 1 if the bug is there.",
        '"""',
        *(["import subprocess"] if outcome.status in ("crashed", "timeout") else []),
        "import sys",
        "import torch",
        *dict.fromkeys(
            [*call.imports, *(["import torch.nn.functional as F"] if outcome.error == "worst_tile" else [])]
        ),
        f'device, dtype = "{device}", torch.{case.dtype}',
    ]
    reference = _formula(case) if outcome.status == "inaccurate" or "formula" in "".join(call.lines) else []
    try:
        tensors = _tensors(example, inputs, layout)
    except Unwritable as error:
        return Script(text="", why_not=f"{error}: run the overrides")
    body = [*tensors, *_judged(example, outcome, device)]
    if outcome.status in ("crashed", "timeout"):
        body = _apart(body)
    lines = [*head, *_added(case), *reference, *call.lines, *body]
    if len(lines) > MOST_LINES:
        return Script(text="", why_not=f"it would have {len(lines)} lines: run the overrides")
    return Script(text="\n".join(lines) + "\n", why_not=call.why_not)


def _added(case: Case) -> list[str]:
    """Return the lines that make what is `added` to scores, (q_heads, q_len, kv_len); none if nothing is."""
    lines, terms = [], []
    if biased(case):
        lines += [
            f"i, j = torch.arange({case.q_len}, device=device)[:, None], torch.arange({case.kv_len}, device=device)"
        ]
    if case.alibi:
        slopes = f"torch.tensor({alibi_slopes(case.q_heads)}, device=device)[:, None, None]"
        terms += [f"-{slopes} * (i + {case.offset} - j).abs()"]
    if case.bias is not None:
        of_heads = f"torch.arange({case.q_heads if case.bias == 'heads' else 1}, device=device)[:, None, None]"
        mixed = f"(i * {OF_QUERY} + j * {OF_KEY} + {of_heads} * {OF_HEAD}) % 2**32"
        lines += [f"mixed = {mixed}  # numbers that look random"]
        lines += [f"for by, factor in {MIXES}: mixed = (mixed ^ (mixed >> by)) * factor % 2**32"]
        terms += [f"((mixed ^ (mixed >> {LAST_SHIFT})) % 128 - 64) / 32"]
    return [*lines, f"added = ({' + '.join(terms)}).expand({case.q_heads}, -1, -1)"] if terms else []


def _formula(case: Case) -> list[str]:
    """Return the definition of attention in the tensors' precision, with zeros for a query that sees no key."""
    group = case.q_heads // case.kv_heads
    lines = ["def formula(q, k, v):"]
    lines += [f"    k, v = (t.repeat_interleave({group}, 1) for t in (k, v))"] if group > 1 else []
    lines += [f"    scores = q @ k.mT * {case.head_dim} ** -0.5"]
    if case.softcap is not None:
        lines += [f"    scores = {case.softcap:g} * torch.tanh(scores / {case.softcap:g})"]
    lines += ["    scores = scores + added.to(scores.dtype)"] if biased(case) else []
    if case.dense:
        return [*lines, "    return torch.softmax(scores, -1) @ v"]
    lines += [f"    i = torch.arange({case.q_len}, device=device)[:, None] + {case.offset}"]
    lines += [f"    j = torch.arange({case.kv_len}, device=device)"]
    hidden = ["(j > i)"] if case.causal else []
    hidden += [f"(j <= i - {case.window})"] if case.window is not None else []
    start = "0"
    if case.lengths is not None:
        ends = [sum(case.lengths[:count]) for count in range(len(case.lengths) + 1)]
        lines += [f"    ends = torch.tensor({ends}, device=device)"]
        hidden += ["(torch.bucketize(i, ends, right=True) != torch.bucketize(j, ends, right=True))"]
        start = "ends[torch.bucketize(i, ends, right=True) - 1]"
    if case.chunk is not None:
        hidden += [f"((i - {start}) // {case.chunk} != (j - {start}) // {case.chunk})"]
    if case.prefix is not None:
        hidden[0] = f"((j > i) & (j >= {start} + {case.prefix}))"
    lines += [f"    hidden = {' | '.join(hidden)}"]
    lines += ["    scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)"]
    return [*lines, "    return torch.softmax(scores, -1).masked_fill(hidden, 0) @ v  # zeros without a visible key"]


def _tensors(example: Example, inputs: Inputs, layout: str) -> list[str]:
    """Return the lines that make q, k, v and d_out. Raises Unwritable if these are too large to be written down."""
    case = example.case
    shapes = {
        "q": (case.batch, case.q_heads, case.q_len, case.head_dim),
        "k": (case.batch, case.kv_heads, case.kv_len, case.head_dim),
        "v": (case.batch, case.kv_heads, case.kv_len, case.value_dim),
        "d_out": (case.batch, case.q_heads, case.q_len, case.value_dim),
    }
    made = ", ".join(f"normal{shape}".replace(" ", "") for shape in shapes.values())
    lines = [f"generator = torch.Generator(device).manual_seed({example.seed})"]
    if example.inputs != KINDS[0]:
        lines = _written_down(inputs)
    elif example.large == "whole":
        filled = "torch.randn(shape[2:], generator=generator, dtype=dtype, device=device)"
        zeros = "torch.zeros(shape, dtype=dtype, device=device)"
        if layout == "bshd":
            zeros = "torch.zeros(shape[0], shape[2], shape[1], shape[3], dtype=dtype, device=device).transpose(1, 2)"
        lines += [
            "def normal(*shape):  # zeros but for the heads that are compared",
            f"    tensor = {zeros}",
            f"    for row, head in {places_of(case)}:",
            f"        tensor[row, head] = {filled}",
            "    return tensor",
            f"q, k, v, d_out = {made}",
        ]
    else:
        lines += ["def normal(*shape):"]
        lines += ["    return torch.randn(shape, generator=generator, device=device, dtype=dtype)"]
        lines += [f"q, k, v, d_out = {made}"]
    if layout == "bshd" and example.large != "whole":
        lines += ["q, k, v, d_out = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v, d_out))"]
    if example.large in ("q", "k", "v"):
        axis = spread_axis(shapes[example.large])
        step = step_of(shapes[example.large][axis])
        lines += [
            "def spread(t):  # offsets above 2^31 elements, in memory that is mostly never touched",
            f"    strides = [{step} if axis == {axis} else t.stride(axis) for axis in range(4)]",
            f"    room = torch.empty((t.shape[{axis}] - 1) * {step} + t.numel(), dtype=dtype, device=device)",
            "    return room.as_strided(t.shape, strides).copy_(t)",
            f"{example.large} = spread({example.large})",
        ]
    return [*lines, "q, k, v = (t.requires_grad_() for t in (q, k, v))"] if example.backward else lines


def _written_down(inputs: Inputs) -> list[str]:
    """Return lines with the bits of q, k, v and d_out, for values that no line of code makes."""
    tensors = (*inputs.qkv, inputs.d_out_bhsd)
    bits = b"".join(
        bytes(tensor.detach().cpu().contiguous().view(torch.uint8).flatten().tolist()) for tensor in tensors
    )
    text = base64.b64encode(zlib.compress(bits, 9)).decode()
    if len(text) > _MOST_TEXT:
        raise Unwritable(f"the program would have {len(text):,} letters of values")
    shapes = [tuple(tensor.shape) for tensor in tensors]
    return [
        "import base64, zlib",
        f"bits = bytearray(zlib.decompress(base64.b64decode('{text}')))",
        "numbers = torch.frombuffer(bits, dtype=dtype).to(device)",
        f"shapes = {shapes}",
        "parts = numbers.split([torch.Size(shape).numel() for shape in shapes])",
        "q, k, v, d_out = (part.view(shape) for part, shape in zip(parts, shapes))",
    ]


def _judged(example: Example, outcome: Outcome, device: str) -> list[str]:
    """Return the lines that call the candidate, compare, print and exit."""
    gradients = "torch.autograd.grad({}, {}, {})"
    if outcome.status != "inaccurate":
        calls = ["out = candidate(q, k, v)"]
        calls += [gradients.format("out", "(q, k, v)", "d_out")] if example.backward else []
        calls += ["torch.cuda.synchronize()"] if device == "cuda" else []
        caught = ["except Exception as error:", "    print(f'{type(error).__name__}: {error}')", "    sys.exit(1)"]
        return ["try:", *(f"    {call}" for call in calls), *caught, "print('no error')"]
    name = outcome.tensor if outcome.tensor in _GRADIENTS else "out"
    part = ""
    if outcome.place is not None:
        row, head = outcome.place
        part = f"[{row}:{row + 1}, {head}:{head + 1}]"
    lines = ["out = candidate(q, k, v)", f"wide = [t{part}.detach().double() for t in (q, k, v, d_out)]"]
    if name == "out":
        lines.append(f"found, exact = out.detach(){part}.double(), formula(*wide[:3])")
    else:
        index = _GRADIENTS.index(name)
        lines.append("leaves = [t.requires_grad_() for t in wide[:3]]")
        lines.append(f"found = {gradients.format('out', '(q, k, v)', 'd_out')}[{index}]{part}.double()")
        lines.append(f"exact = {gradients.format('formula(*leaves)', 'leaves', 'wide[3]')}[{index}]")
    # What is not finite is off by any amount.
    allowed = f"{outcome.allowed:.3g}" if outcome.allowed is not None else "1"
    least, scale = (f"{value:.3g}" for value in outcome.vanishing)
    lines.append("rms = exact.square().mean().sqrt().item()")
    # Where the right values vanish, errors are relative to what the inputs could give (attn_exp/attention/error.py).
    lines.append(f"typical = (rms if rms > {least} else {scale}) * exact.shape[-1] ** 0.5  # the norm of a row")
    lines += _errors(outcome)
    lines.append(f'print(f"{name}: {{what}} {{error:.3g}}, allowed is {allowed}")')
    return [*lines, f"sys.exit(not error {'>=' if outcome.error == 'least_row' else '<='} {allowed})"]


def _errors(outcome: Outcome) -> list[str]:
    """Return the lines that set `error` and say `what` it is, as attn_exp/attention/error_parts.py has it."""
    rows = [f"norms = exact.norm(dim=-1).clamp(min={outcome.least_norm:.3g} * typical)"]
    rows.append("errors = (found - exact).norm(dim=-1)")
    match outcome.error:
        case "worst_row" | "own_row":
            last = "what, error = 'a row is off, relative to its norm, by', (errors / norms).max().item()"
        case "worst_tile":
            rows.append("squares = [F.pad(t.square(), (0, -t.shape[-1] % 64)) for t in (errors, norms)]")
            rows.append("tiles = [t.unflatten(-1, (-1, 64)).sum(-1) for t in squares]")
            last = "what, error = 'a tile is off by', (tiles[0] / tiles[1]).sqrt().max().item()"
        case "least_row":
            rows = ["follows = (found * exact).sum(-1) / exact.square().sum(-1)"]
            # Small rows count only if they are zeros.
            rows.append("norms, lost = exact.norm(dim=-1) / typical, found.norm(dim=-1) == 0")
            rows.append("follows = follows[(norms > 0.5) | (lost & (norms > 1e-4))]")
            last = "what, error = 'a row is this share of what is right:', follows.min().item()"
        case "bias":
            rows = ["along = (found * exact).sum((-2, -1)) / exact.square().sum((-2, -1))"]
            last = "what, error = 'the mean is off by', (along - 1).abs().max().item()"
        case _:
            rows = []
            last = "what, error = 'off by', (found - exact).norm(dim=-1).square().mean().sqrt().item() / typical"
    return [*rows, last]


def _apart(body: list[str]) -> list[str]:
    """Return lines that run `body` in a process of its own, which dies or hangs."""
    return [
        "if len(sys.argv) == 1:",
        "    try:",
        "        code = subprocess.run([sys.executable, __file__, 'now'], timeout=120).returncode",
        "    except subprocess.TimeoutExpired:",
        "        code = 'none after 120 s'",
        "    print(f'exit code of the call: {code}')",
        "    sys.exit(code != 0)",
        *body,
    ]


def _layout(inputs: DifferentiableInputs | None, case: Case) -> str:
    """Return the layout of the tensors that the backend's function really gets."""
    if inputs is None:
        return case.layout
    q = inputs.operands[0]
    return "bshd" if not q.is_contiguous() and q.transpose(1, 2).is_contiguous() else "bhsd"


def _one_line(text: str) -> str:
    flat = " ".join(text.replace('"', "'").replace("\\", "/").split())
    return flat if len(flat) <= _WIDTH else f"{flat[:_WIDTH]} ..."
