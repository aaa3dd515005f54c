"""What docs/private_api.md lists is what the package uses, and the installed libraries have it."""

import ast
import importlib
import importlib.util
import inspect
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
PACKAGE, PAGE = ROOT / "attn_exp", ROOT / "docs/private_api.md"
# Modules that their projects do not document, beside those with an underscore.
UNDOCUMENTED = (
    *("hydra.core.override_parser", "hydra.core.plugins", "hydra.core.utils", "mlflow.store", "submitit.core"),
    *("torch.compiler.config", "torch.fx.experimental", "triton.knobs", "triton.profiler", "triton.tools"),
)
OPTIONAL = ("flash_attn_interface", "xformers")
# Their names are private wherever they stand in a string, too: `importlib.import_module("torch._dynamo")`.
LIBRARIES = (*OPTIONAL, "hydra", "mlflow", "omegaconf", "torch", "triton")


def read_rows():
    """The rows of all tables whose first cell is a dotted name: (name, folders, purpose, test)."""
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in PAGE.read_text().splitlines()
        if re.match(r"\| `\w+\.[\w.]+` \|", line)
    ]
    return [
        (name.strip("`"), set(re.findall(r"`(\w+)`", folders)), purpose, "".join(rest).strip("`"))
        for name, folders, purpose, *rest in cells
    ]


ROWS = read_rows()
REQUIRED = [(name, purpose) for name, _, purpose, _ in ROWS if name.split(".")[0] not in OPTIONAL]


def resolve(dotted):
    """The object of a dotted name. Raises AttributeError or ImportError if there is none."""
    parts = dotted.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            found = getattr(found, part)
        return found
    raise ImportError(dotted)


def installed(library):
    distribution = {"hydra": "hydra-core"}.get(library, library)
    return f"{distribution} {version(distribution)}"


def is_private(name):
    """Whether a dotted name of another project is not documented there."""
    parts = name.split(".")
    if parts[0] in sys.stdlib_module_names or parts[0] == "attn_exp":
        return False
    hidden = any(re.match(r"_(?!_)", part) for part in parts)
    return hidden or any(f"{name}.".startswith(f"{one}.") for one in UNDOCUMENTED)


def own_names(text):
    """The names with an underscore that a module's code defines."""
    return set(re.findall(r"(?:def |class |self\.|cls\.|^ *)(_\w+)\b(?= *[:=(,])", text, re.MULTILINE))


def private_names(text, own=frozenset()):
    """The private names that a module's code uses, and private attributes, but for the package's own, of whatever."""
    tree = ast.parse(text)
    names, used = {}, set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            used |= {alias.name for alias in node.names}
            names |= {alias.asname or alias.name.split(".")[0]: alias.name for alias in node.names if alias.asname}
            names |= {top: top for alias in node.names if (top := alias.name.split(".")[0]) and not alias.asname}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                used.add(f"{node.module}.{alias.name}")
    inner = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and re.fullmatch(rf"({'|'.join(LIBRARIES)})(\.\w+)+", str(node.value)):
            used.add(node.value)
        if not isinstance(node, ast.Attribute) or node in inner:
            continue
        parts, base = [node.attr], node.value
        while isinstance(base, ast.Attribute):
            inner.add(base)
            parts, base = [base.attr, *parts], base.value
        if isinstance(base, ast.Name) and base.id in names:
            used.add(".".join([names[base.id], *parts]))
        elif re.match(r"_(?!_)", node.attr) and not (isinstance(base, ast.Name) and base.id in ("self", "cls")):
            used |= set() if node.attr in own else {f"?.{node.attr}"}
    return {name for name in used if is_private(name)}


def usage():
    """The folders of the package in which each private name is used."""
    found = {}
    own = set().union(*(own_names(path.read_text()) for path in PACKAGE.rglob("*.py")))
    for path in PACKAGE.rglob("*.py"):
        folder = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for name in private_names(path.read_text(), own):
            found.setdefault(name, set()).add(folder)
    return found


def covers(listed, name):
    """Whether a listed name is this one, one of its attributes, or in this module."""
    if name.startswith("?."):
        return listed.split(".")[-1] == name[2:]
    return f"{name}.".startswith(f"{listed}.") or f"{listed}.".startswith(f"{name}.")


def test_all_private_names_that_are_used_are_listed_with_their_folders():
    for name, folders in sorted(usage().items()):
        listed = set().union(*(row[1] for row in ROWS if covers(row[0], name)))
        assert folders <= listed, f"{name} is private, and docs/private_api.md does not list it for {folders - listed}"


def test_all_that_is_listed_is_used():
    texts = {}
    for path in PACKAGE.rglob("*.py"):
        folder = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        texts[folder] = texts.get(folder, "") + path.read_text()
    for name, folders, _, _ in ROWS:
        for folder in folders:
            last = name.split(".")[-1]
            assert re.search(rf"(\b|\.){last}\b", texts.get(folder, "")), (
                f"{folder} does not use {name}: delete its row"
            )


def test_every_row_names_a_test_of_this_file():
    tests = set(re.findall(r"^def (test_\w+)", Path(__file__).read_text(), re.MULTILINE))
    named = set(re.findall(r"`(test_\w+)`", PAGE.read_text()))
    assert named <= tests
    lacking = [name for name, _, _, test in ROWS if not test and name.split(".")[0] not in (*OPTIONAL, "submitit")]
    assert lacking == []


def test_modules_with_sql_are_where_the_page_says():
    sql = re.compile(r"^\s*SELECT |\"SELECT |\"PRAGMA ", re.MULTILINE)
    assert {path.parent.name for path in PACKAGE.rglob("*.py") if sql.search(path.read_text())} == {"tracking"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import torch\ntorch.cuda._sleep(1)", {"torch.cuda._sleep"}),
        ("import torch as t\nt._C.f()", {"torch._C.f"}),
        ("from hydra._internal.utils import get_args_parser", {"hydra._internal.utils.get_args_parser"}),
        ("import importlib\nimportlib.import_module('torch._dynamo')", {"torch._dynamo"}),
        ("load()._secret()", {"?._secret"}),
        ("import os\nos._exit(0)\nself._secret = 1", set()),
        ("import torch\ntorch.cuda.synchronize()\ntorch.__version__", set()),
        ("from attn_exp.sweep import _own", set()),
    ],
)
def test_private_names_are_found_in_code(text, expected):
    assert private_names(text) == expected


def test_the_packages_own_names_are_no_private_api():
    text = "class A:\n    _field: int\n    def _method(self):\n        self._made = 1\n\nload()._secret()"
    assert own_names(text) == {"_field", "_method", "_made"}
    assert private_names("one._field + two()._method() + three._secret", own_names(text)) == {"?._secret"}


@pytest.mark.parametrize(("name", "purpose"), REQUIRED)
def test_the_name_exists(name, purpose):
    library = name.split(".")[0]
    if name == "torch.autograd.profiler.profile.kineto_results":
        name = "torch.autograd.profiler.profile"  # an attribute of its instances
    try:
        resolve(name)
    except (ImportError, AttributeError):
        pytest.fail(f"{installed(library)} has no {name}, which attn_exp uses to {purpose}")


def test_a_name_that_is_gone_is_reported():
    with pytest.raises(AttributeError, match="_slept"):
        resolve("torch.cuda._slept")
    with pytest.raises(ImportError):
        resolve("no_such_library.anything")


def arguments_of(operator):
    return [argument.name for argument in operator.default._schema.arguments]


def assert_takes(function, *arguments, **named):
    """Fail in one sentence if a function does not take such a call."""
    try:
        inspect.signature(function).bind(*arguments, **named)
    except TypeError as error:
        pytest.fail(
            f"{function.__module__}.{function.__qualname__} does not take attn_exp's arguments any more: {error}"
        )


def test_scaled_mm_takes_our_arguments():
    lacking = {"scale_a", "scale_b", "out_dtype", "use_fast_accum"} - set(arguments_of(torch.ops.aten._scaled_mm))
    assert not lacking, f"torch._scaled_mm takes no {lacking} any more"


def test_int_mm_multiplies_codes():
    one, other = torch.full((32, 32), 100, dtype=torch.int8), torch.full((32, 32), -100, dtype=torch.int8)
    assert (torch._int_mm(one, other.t()) == -320_000).all(), "torch._int_mm does not sum in int32 any more"


def test_the_cudnn_operator_takes_our_arguments():
    expected = ["query", "key", "value", "attn_bias", "compute_log_sumexp", "dropout_p", "is_causal"]
    found = arguments_of(torch.ops.aten._scaled_dot_product_cudnn_attention)[: len(expected)]
    assert found == expected, f"the operator's arguments are {found} now, and backends/sdpa.py passes {expected}"


def test_sdpas_order_can_be_read_and_set():
    q = torch.randn(1, 1, 4, 8)
    assert isinstance(torch._fused_sdp_choice(q, q, q), int)
    before = torch._C._get_sdp_priority_order()
    try:
        torch._C._set_sdp_priority_order([3, 1, 2, 0])
        assert torch._C._get_sdp_priority_order()[:4] == [3, 1, 2, 0]
    finally:
        torch._C._set_sdp_priority_order(before)


def test_sdpa_calls_the_flash_operator_on_a_cpu():
    from attn_exp.timers.operators import operators

    q = torch.randn(1, 2, 32, 16)
    ran = operators(lambda: torch.nn.functional.scaled_dot_product_attention(q, q, q)).kernels()
    names = [kernel.name for kernel in ran]
    wanted = "aten::_scaled_dot_product_flash_attention_for_cpu"
    assert wanted in names, f"SDPA does not call {wanted} on a CPU any more, but {names}"


def test_kineto_results_have_names_times_and_devices():
    from torch.autograd.profiler import profile

    with profile(use_cpu=True, use_kineto=True) as session:
        torch.ones(3).sum()
    try:
        seen = {event.name(): event for event in session.kineto_results.events()}
        event = seen["aten::sum"]
        kinds = (type(event.start_ns()), type(event.duration_ns()), str(event.device_type()))
        numbers = (type(event.device_resource_id()), type(event.start_thread_id()))
    except (AttributeError, TypeError, KeyError) as error:
        pytest.fail(f"the events of kineto_results have changed, which timers/trace.py reads: {error!r}")
    assert kinds == (int, int, "DeviceType.CPU"), "times in integer nanoseconds, or the device's name, have changed"
    assert numbers == (int, int), "the numbers of streams and threads have changed"


def test_the_profiler_imports_no_inductor():
    code = "import sys, torch, torch.autograd.profiler; print('torch._inductor' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "False\n", "torch.autograd.profiler imports Inductor now, which costs each worker seconds"


def test_the_first_backward_imports_symbolic_shapes():
    code = (
        "import sys, torch; x = torch.ones(2, requires_grad=True); name = 'torch.fx.experimental.symbolic_shapes'; "
        "before = name in sys.modules; torch.autograd.grad(x * 2, x, torch.ones(2)); print(before, name in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "False True\n", (
        "worker/machine/device.py imports ahead what the first backward does not import any more"
    )


@pytest.fixture
def dynamo():
    """Dynamo with its counts at zero."""
    import torch._dynamo

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch._dynamo.utils.clear_compilation_metrics()
    yield torch._dynamo
    torch._dynamo.reset()


def test_dynamo_counts_graphs_and_breaks(dynamo):
    def broken(x):
        x = x + 1
        dynamo.graph_break()
        return x * 2

    torch.compile(broken, backend="eager")(torch.ones(2))
    counters = dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] == 2, "Dynamo does not count graphs in counters['stats']['unique_graphs']"
    assert sum(counters["graph_break"].values()) == 1, (
        "Dynamo does not count breaks in counters['graph_break'] any more"
    )
    assert all(isinstance(reason, str) for reason in counters["graph_break"]), "a break's reason is no text any more"


def test_modes_that_are_active_are_listed():
    from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
    from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

    before = len(_get_current_function_mode_stack()), len(_get_current_dispatch_mode_stack())
    with TorchFunctionMode() as one, TorchDispatchMode() as other:
        assert _get_current_function_mode_stack()[-1] is one
        assert _get_current_dispatch_mode_stack()[-1] is other
    assert (len(_get_current_function_mode_stack()), len(_get_current_dispatch_mode_stack())) == before


def test_hooks_of_all_modules_are_listed():
    from torch.nn.modules import module

    handles = [
        module.register_module_forward_hook(print),
        module.register_module_forward_pre_hook(print),
        module.register_module_full_backward_hook(print),
        module.register_module_full_backward_pre_hook(print),
    ]
    names = ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks")
    try:
        for name in (*names, "_global_backward_pre_hooks"):
            assert print in getattr(module, name).values(), name
    finally:
        for handle in handles:
            handle.remove()
        # The kind of the last backward hook stays, and refuses hooks of the other kind.
        module._global_is_full_backward_hook = None


def test_an_operator_that_python_computes_is_listed():
    library = torch.library.Library("aten", "IMPL")
    library.impl("digamma", lambda x: x, "CPU")
    try:
        assert "aten/digamma/CPU" in torch.library._impls
    finally:
        library._destroy()
    assert "aten/digamma/CPU" not in torch.library._impls


def test_dynamo_numbers_recompilations(dynamo):
    call = torch.compile(lambda x: x + 1, backend="eager", dynamic=False)
    for size in (2, 3):
        call(torch.ones(size))
    ids = [str(entry.compile_id) for entry in dynamo.utils.get_compilation_metrics()]
    assert ids == ["0/0", "0/1"], f"Dynamo's compile ids are not frame/attempt any more, but {ids}"
    dynamo.utils.clear_compilation_metrics()
    assert not dynamo.utils.get_compilation_metrics(), "clear_compilation_metrics does not clear any more"


def test_dynamo_raises_our_exceptions(dynamo):
    def broken(x):
        dynamo.graph_break()
        return x

    with pytest.raises(dynamo.exc.Unsupported):
        torch.compile(broken, backend="eager", fullgraph=True)(torch.ones(2))
    with pytest.raises(dynamo.exc.TorchRuntimeError):
        torch.compile(lambda x: x @ x, backend="eager", fullgraph=True)(torch.ones(2, 3))


def test_inductor_lists_its_options():
    import torch._inductor

    known = torch._inductor.list_options()
    assert {"triton.cudagraphs", "max_autotune"} <= set(known), "Inductor's options have other names now"
    mode = torch._inductor.list_mode_options("reduce-overhead")
    assert mode.get("triton.cudagraphs") is True, "compile=reduce-overhead does not use CUDA graphs any more"


def test_a_descriptor_has_a_block_shape_that_can_be_set():
    from triton.tools.tensor_descriptor import TensorDescriptor

    descriptor = TensorDescriptor(torch.zeros(1, 1, 16, 16), [1, 1, 16, 16], [256, 256, 16, 1], [1, 1, 16, 16])
    descriptor.block_shape = [1, 1, 8, 16]
    assert descriptor.block_shape == [1, 1, 8, 16]


def test_proton_takes_our_arguments():
    proton = importlib.import_module("triton.profiler")
    assert_takes(proton.start, "path", context="shadow", data="tree", backend="cupti", mode="pcsampling")
    assert_takes(proton.scope, "forward", {"flops": 1.0})
    assert_takes(proton.finalize, 0)


@pytest.fixture
def override():
    from hydra.core.override_parser.overrides_parser import OverridesParser

    return lambda text: OverridesParser.create().parse_overrides([text])[0]


def test_a_parsed_override_has_our_attributes(override):
    parsed = override("+stopping.budget_s=5")
    assert (parsed.key_or_group, parsed.value(), parsed.input_line) == ("stopping.budget_s", 5, "+stopping.budget_s=5")
    assert (parsed.is_add(), parsed.is_delete(), parsed.is_hydra_override()) == (True, False, False)
    assert override("~dtype").is_delete() and override("hydra.verbose=true").is_hydra_override()


def test_the_values_of_a_choice_can_be_counted(override):
    from hydra.core.override_parser.types import ChoiceSweep, RangeSweep

    choice, spaced = override("batch=1,8").value(), override("batch=range(1,9,3)").value()
    assert isinstance(choice, ChoiceSweep) and len(choice.list) == 2
    assert isinstance(spaced, RangeSweep) and (spaced.start, spaced.stop, spaced.step) == (1, 9, 3)


def test_overrides_are_applied_in_place(override):
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from omegaconf import OmegaConf

    config = OmegaConf.create({"batch": 1, "hydra": {"overrides": {"task": []}}})
    ConfigLoaderImpl._apply_overrides_to_config([override("batch=8")], config)
    assert config.batch == 8, "ConfigLoaderImpl._apply_overrides_to_config does not change the configuration in place"
    assert_takes(ConfigLoaderImpl.load_sweep_config, None, config, [])


def test_override_dirname_takes_our_arguments(override):
    from hydra._internal.config_loader_impl import get_overrides_dirname

    made = get_overrides_dirname(
        [override("batch=8"), override("dtype=bf16")], kv_sep="=", item_sep=",", exclude_keys=["dtype"]
    )
    assert made == "batch=8", f"get_overrides_dirname makes {made} now"


def test_the_basic_sweeper_makes_the_product(override):
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

    jobs = BasicSweeper.split_arguments([override("backend=flash,math"), override("batch=1,8")], None)[0]
    assert [list(job) for job in jobs] == [
        [f"backend={backend}", f"batch={batch}"] for backend in ("flash", "math") for batch in (1, 8)
    ]


def test_the_parser_of_flags_has_our_flags():
    from hydra._internal.utils import get_args_parser

    parser = get_args_parser()
    given = parser.parse_args(["-m", "batch=1,8"])
    assert (given.multirun, given.overrides) == (True, ["batch=1,8"])
    flags = {"help", "hydra_help", "cfg", "info", "shell_completion", "run", "package", "resolve", "experimental_rerun"}
    lacking = (flags | {"config_path", "config_dir", "config_name"}) - set(vars(given))
    assert not lacking, f"Hydra's parser has no {lacking} any more"
    assert callable(parser.error)


def test_hydras_object_takes_our_arguments():
    from hydra._internal.hydra import Hydra

    named = {"config_name": "config", "overrides": []}
    assert_takes(Hydra.create_main_hydra2, task_name="attn_exp", config_search_path=None)
    assert_takes(Hydra.app_help, None, config_name="config", args_parser=None, args=None)
    assert_takes(Hydra.hydra_help, None, config_name="config", args_parser=None, args=None)
    assert_takes(Hydra.show_cfg, None, "config", [], "job", None, False)
    assert_takes(Hydra.show_info, None, "all", **named)
    assert_takes(Hydra.shell_completion, None, **named)
    assert_takes(Hydra.get_mode, None, **named)
    for method in (Hydra.run, Hydra.multirun):
        assert_takes(method, None, task_function=None, **named)


def test_the_search_path_can_be_extended(tmp_path):
    from hydra._internal.utils import create_config_search_path
    from hydra.core.config_search_path import SearchPathQuery

    path = create_config_search_path(str(tmp_path))
    path.prepend(provider="own", path="file:///own", anchor=SearchPathQuery(provider="schema"))
    providers = [element.provider for element in path.get_path()]
    assert providers.index("own") < providers.index("schema"), (
        "a folder of one's own does not come before Hydra's any more"
    )


def test_loading_the_plugins_finds_our_sweeper():
    from hydra.core.plugins import Plugins
    from hydra.plugins.sweeper import Sweeper

    modules = {plugin.__module__ for plugin in Plugins.instance().discover(Sweeper)}
    assert any(name.startswith("hydra_plugins.attn_exp") for name in modules), f"Hydra finds sweepers only in {modules}"


def test_run_job_takes_our_arguments():
    from hydra.core.utils import run_job

    assert_takes(
        run_job, task_function=None, config=None, job_dir_key="", job_subdir_key=None, configure_logging=False,
        hydra_context=None,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("backend=flsh", r"backend=flsh does not exist: did you mean 'flash'\?"),
        ("bach=8", r"there is no key 'bach': did you mean 'batch'\?"),
        ("+batch=8", r"that key is there already: write batch=8 without the \+"),
        ("batch=[1", "the value of batch cannot be read"),
        ("batch=1,8", r"give batch one value|several values need -m"),
        ("model.qheads=2", r"there is no key 'model.qheads': did you mean 'model.q_heads'\?"),
    ],
)
def test_hydras_messages_are_recognised(typed, message):
    from attn_exp.config.compose import compose_config
    from attn_exp.core.errors import UserError

    with pytest.raises(UserError, match=message):
        compose_config([typed], "s")


def test_the_number_of_retries_can_be_set():
    from mlflow.store.db import utils

    assert isinstance(utils.MAX_RETRY_COUNT, int), "MAX_RETRY_COUNT is no number any more"
    used = inspect.getsource(utils).count("MAX_RETRY_COUNT")
    assert used > 1, "mlflow.store.db.utils does not read MAX_RETRY_COUNT any more"


def test_requests_are_sent_through_the_session():
    from mlflow.utils import request_utils

    sent = inspect.getsource(request_utils._get_http_response_with_retries)
    assert "session = _get_request_session(" in sent, "MLflow sends requests without _get_request_session"
    assert "session.request(" in sent, "MLflow sends requests without the session"


def test_a_store_creates_its_database_when_it_is_made(tmp_path):
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    from attn_exp.tracking.database import State, check_database

    assert_takes(SqlAlchemyStore, "sqlite://", "artifacts")
    SqlAlchemyStore(f"sqlite:///{tmp_path}/x.db", str(tmp_path)).engine.dispose()
    assert check_database(tmp_path / "x.db") is State.CURRENT


def test_a_store_keeps_its_engine(tmp_path):
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    uri = f"sqlite:///{tmp_path}/x.db"
    engine = SqlAlchemyStore._get_or_create_engine(uri)
    assert SqlAlchemyStore._engine_map.pop(uri) is engine
    engine.dispose()


def test_an_artifact_repository_takes_our_arguments(tmp_path):
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    assert_takes(get_artifact_repository, str(tmp_path), "sqlite://")
    (tmp_path / "from").mkdir()
    (tmp_path / "from/record.json").write_text("{}")
    get_artifact_repository((tmp_path / "to").as_uri()).log_artifacts(str(tmp_path / "from"))
    assert (tmp_path / "to/record.json").read_text() == "{}"


def test_the_tables_have_our_columns():
    from mlflow.store.tracking.dbmodels.models import Base

    columns = {name: set(table.columns.keys()) for name, table in Base.metadata.tables.items()}
    wanted = {
        "experiments": {"experiment_id", "name"},
        "runs": {"run_uuid", "experiment_id", "artifact_uri", "status", "lifecycle_stage", "start_time"},
        "tags": {"run_uuid", "key", "value"},
    }
    lacking = {name: names - columns.get(name, set()) for name, names in wanted.items()}
    assert not any(lacking.values()), f"MLflow's tables lack what attn_exp/tracking selects: {lacking}"


def test_migrations_are_named_by_their_revision():
    folder = Path(importlib.util.find_spec("mlflow").submodule_search_locations[0], "store/db_migrations/versions")
    files = list(folder.glob("*.py"))
    named = {path.name.split("_")[0] for path in files}
    revisions = {found[1] for path in files if (found := re.search(r"^revision = ['\"](\w+)", path.read_text(), re.M))}
    assert revisions and revisions <= named, "MLflow's migrations are not files of their revision's name any more"


def test_the_pages_know_our_view_state():
    from attn_exp.tracking.base import RUN_COLOUR
    from attn_exp.tracking.page import NOTE
    from attn_exp.tracking.view import all_sweeps, one_sweep

    folder = Path(importlib.util.find_spec("mlflow").submodule_search_locations[0], "server/js/build")
    pages = b"".join(path.read_bytes() for path in folder.rglob("*.js"))
    state = one_sweep("first")
    nested = [*state["compareRunCharts"][-1], *state["compareRunSections"][0]]
    words = ["mlflow.sharedViewState", "viewStateShareKey", "workflowType", "compareRunsMode", RUN_COLOUR, NOTE]
    words += [*all_sweeps(), *state, *nested]
    lacking = [word for word in words if word.encode() not in pages]
    assert not lacking, f"MLflow's pages do not know {lacking} any more, with which attn-exp ui opens its list"
