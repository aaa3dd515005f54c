"""What judging and timing use of Python and PyTorch, and must find as it was before a backend was loaded.

Only what no library is known to replace for good reasons stands here: importing Dynamo, Inductor or Triton replaces
none of it. `tests/test_guard.py` compares the names with those that the package's modules use.
"""

# Names by the module or class that has them; `*` stands for all that a class defines.
NAMES: dict[str, str] = {
    "time": (
        "monotonic monotonic_ns perf_counter perf_counter_ns process_time process_time_ns sleep thread_time "
        "thread_time_ns time time_ns"
    ),
    "math": "ceil exp expm1 floor fsum inf isfinite isnan log prod sqrt",
    "statistics": "fmean mean median quantiles stdev",
    "secrets": "randbelow randbits token_bytes",
    "random": "Random SystemRandom random",
    "random.Random": "*",
    "random.SystemRandom": "*",
    "gc": "collect disable enable freeze isenabled",
    "os": "_exit close dup2 fdopen open urandom",
    "contextlib": "contextmanager nullcontext suppress",
    "functools": "cache lru_cache partial wraps",
    "dataclasses": "dataclass field replace",
    "torch": (
        "Generator Size Tensor _int_mm _scaled_mm abs all allclose amax aminmax any arange "
        "are_deterministic_algorithms_enabled argmax argsort as_strided as_tensor baddbmm bfloat16 bincount "
        "bitwise_and bitwise_or bitwise_xor bmm bool broadcast_shapes "
        "broadcast_to cat ceil clamp clone count_nonzero cumsum device div "
        "dtype einsum empty empty_like empty_strided equal exp exp2 eye finfo flatten flip float16 float32 float64 "
        "float8_e4m3fn floor from_numpy frombuffer full full_like gather get_default_dtype "
        "get_deterministic_debug_mode get_float32_matmul_precision get_num_threads "
        "iinfo index_select inf int16 int32 int64 int8 is_autocast_enabled is_grad_enabled isclose isfinite isin isinf "
        "isnan linspace log logaddexp logical_and logical_not logical_or logsumexp masked_select matmul max maximum "
        "mean median min minimum mm mul neg no_grad nonzero norm ones ones_like outer permute promote_types rand "
        "rand_like randint randn randn_like randperm repeat_interleave reshape roll round scatter searchsorted "
        "set_autocast_enabled set_default_dtype set_deterministic_debug_mode set_flush_denormal "
        "set_float32_matmul_precision set_grad_enabled set_num_threads "
        "sign sin softmax sort split "
        "sqrt squeeze stack strided sub sum tanh tensor topk transpose tril triu uint8 unique "
        "use_deterministic_algorithms vdot where zeros zeros_like"
    ),
    "torch.linalg": "norm solve vector_norm",
    "torch.autograd": "Function grad",
    "torch.autograd.profiler": "profile",
    "torch.autograd.profiler.profile": "*",
    "torch.nn": "functional",
    "torch.nn.functional": "gelu layer_norm linear pad rms_norm scaled_dot_product_attention silu softmax",
    "torch.backends": "cudnn",
    "torch.version": "cuda",
    "torch.cuda": (
        "CUDAGraph Event Stream current_device current_stream default_stream get_device_properties graph is_available "
        "max_memory_allocated mem_get_info memory_allocated memory_reserved reset_peak_memory_stats set_stream stream "
        "synchronize _sleep"
    ),
    "torch.cuda.CUDAGraph": "*",
    "torch.cuda.Event": "*",
    "torch.cuda.Stream": "*",
    "torch.cuda.graph": "*",
    "torch.cuda.nvtx": "range_pop range_push",
    "torch.Tensor": (
        "__add__ __and__ __bool__ __eq__ __float__ __ge__ __getitem__ __gt__ __index__ __int__ __invert__ "
        "__itruediv__ __le__ __len__ __lt__ __matmul__ __mul__ __ne__ __neg__ __or__ __pow__ __radd__ __rmul__ "
        "__rsub__ __rtruediv__ __setitem__ __sub__ __torch_dispatch__ __torch_function__ __truediv__ __xor__ abs abs_ "
        "add add_ all amax amin aminmax any argmax argmin argsort as_strided backward bfloat16 bitwise_and "
        "bitwise_and_ bitwise_not bitwise_or bitwise_or_ bitwise_xor bitwise_xor_ bmm bool ceil chunk clamp clamp_ "
        "clone contiguous copy_ cos cpu cuda cummax cumsum data data_ptr detach detach_ device diff dim div div_ "
        "double dtype einsum element_size eq eq_ exp exp_ expand fill_ flatten flip float floor gather ge grad "
        "grad_fn gt half index_add_ index_copy_ index_fill_ index_select int is_complex is_conj is_contiguous is_cuda "
        "is_floating_point is_leaf is_neg isfinite isinf isnan item layout le lerp log logical_and logical_not "
        "logical_or logsumexp long lt mT masked_fill masked_fill_ masked_select matmul max maximum mean median min "
        "minimum mm movedim mul mul_ nan_to_num nan_to_num_ nansum narrow nbytes ndim ne neg neg_ negative new_empty "
        "new_full new_tensor new_zeros nonzero norm normal_ numel permute positive pow prod random_ ravel repeat "
        "repeat_interleave requires_grad requires_grad_ reshape roll rot90 round rsqrt scatter scatter_ select shape "
        "sign sin size softmax sort split sqrt square square_ squeeze std stride sub sub_ sum swapaxes t "
        "take take_along_dim tanh tile to tolist topk transpose tril triu trunc type unbind unflatten unfold unsqueeze "
        "untyped_storage values var view view_as where zero_"
    ),
}
# Built-in functions that programs replace for their own output or imports; no number depends on them.
FREE_BUILTINS = frozenset({"__build_class__", "__import__", "compile", "eval", "exec", "input", "open", "print"})
# How the keys of implementations end that compute what a CPU and a GPU compute.
COMPUTING = tuple(
    f"/{key}"
    for key in (
        *("Autograd", "AutogradCPU", "AutogradCUDA", "BackendSelect", "CPU", "CUDA"),
        *("CompositeExplicitAutograd", "CompositeImplicitAutograd"),
    )
)
