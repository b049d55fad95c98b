"""Layers that are configured with a dispatcher of Megatron's, and are ours by the environment."""

import copy
import importlib.metadata
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from flashmoe_megatron.adapters import megatron as adapter
from flashmoe_megatron.adapters.megatron import dispatcher as dispatcher_module
from flashmoe_megatron.adapters.megatron.bridge import (
    patch_dropping,
    patch_flex,
    patch_loading,
    patch_overlaps,
)
from flashmoe_megatron.adapters.megatron.config.asked import is_served
from flashmoe_megatron.adapters.megatron.config.notices import find_notices
from flashmoe_megatron.adapters.megatron.config.refusals import refuse
from flashmoe_megatron.adapters.megatron.config.replaced import OTHER_MEANINGS
from flashmoe_megatron.adapters.megatron.dispatcher import (
    about,
    is_ours,
    keep_dispatcher,
    note_served,
    replaced,
    showing,
)
from flashmoe_megatron.adapters.megatron.schedule import patch_schedule
from flashmoe_megatron.doctor.installed import environment
from flashmoe_megatron.errors import ConfigError
from tests.distributed import PATIENCE_S, RankPool
from tests.megatron import recipes
from tests.megatron.harness import (
    MEGATRON,
    Case,
    Layout,
    prepare,
    replacing,
    transformer_config,
)
from tests.megatron.layers import make_layer
from tests.megatron.recipes import published
from tests.programs import run_python

EP2 = Layout(expert=2)
OVERLAPPED = {"overlap_moe_expert_parallel_comm": True, "bf16": True}
"""Megatron wants half precision; the tests compute in float32, which tells more."""


@pytest.mark.parametrize(
    ("replaces", "config"),
    [
        ("alltoall", {}),
        ("alltoall", OVERLAPPED),
        ("allgather", {}),
        ("flex", {"moe_shared_expert_intermediate_size": 64}),
        ("flex", OVERLAPPED),
    ],
    ids=str,
)
def test_training_in_the_place_of_a_dispatcher_matches_alltoall(
    replaces: str, config: dict[str, Any], two_ranks: RankPool
) -> None:
    """The stock training of the same process opts out, where it would be replaced."""
    case = Case(
        EP2,
        replaces=replaces,
        config=config,
        later={"bf16": False},
        micro_batches=3,
        ddp={"overlap_grad_reduce": True},
    )
    MEGATRON.compare(two_ranks, case)


def test_a_checkpoint_has_the_stock_names(two_ranks: RankPool, tmp_path: Path) -> None:
    case = Case(EP2, replaces="alltoall", steps=2)
    names = []
    for is_fused in (False, True):
        folder = tmp_path / f"{is_fused}"
        MEGATRON.save(two_ranks, case, 1, folder, is_fused=is_fused)
        dcp_to_torch_save(folder, tmp_path / "whole.pt")
        state = torch.load(tmp_path / "whole.pt", weights_only=False)
        names.append({name: getattr(value, "shape", None) for name, value in state.items()})
    assert names[0] == names[1]
    assert any("experts" in name for name in names[1])
    MEGATRON.compare_resumed(two_ranks, case, 1, tmp_path / "True", is_fused=False)


def build(
    group: dist.ProcessGroup, ranks: list[tuple[str, str]], timeout: float
) -> tuple[str, bool]:
    """What a rank hears that builds a layer in an environment, and whether the layer is ours."""
    prepare(Layout())
    prepare(EP2, timeout=timeout)
    name, replaces = ranks[dist.get_rank()]
    try:
        with replacing(replaces):
            layer = make_layer(transformer_config(EP2, name))
    except ConfigError as error:
        said, ours = str(error), False
    else:
        said, ours = "", hasattr(layer, "flashmoe_routed_experts")
        assert layer.config.moe_token_dispatcher_type == name
    dist.barrier()
    return said, ours


def test_ranks_compare_the_dispatcher_in_effect(two_ranks: RankPool) -> None:
    ranks = [("flashmoe", ""), ("alltoall", "alltoall")]
    assert two_ranks.run(build, ranks, PATIENCE_S) == [("", True)] * 2
    ranks = [("alltoall", "alltoall"), ("alltoall", "")]
    first, second = two_ranks.run(build, ranks, PATIENCE_S)
    assert "flashmoe on rank 0, alltoall on rank 1; pass one --moe-token-dispatcher-" in first[0]
    assert first[0].endswith("or one FLASHMOE_REPLACES and no TORCH_DEVICE_BACKEND_AUTOLOAD=0")
    assert second == ("", False)


def build_unserved(group: dist.ProcessGroup, config: dict[str, Any]) -> list[str]:
    """What a rank hears of a layer that flashmoe cannot compute, and of one that opts out."""
    prepare(Layout())
    prepare(EP2)
    with replacing("alltoall"):
        said = []
        for keeps in (False, True):
            config_of_layer = transformer_config(EP2, "alltoall", **config)
            if keeps:
                keep_dispatcher(config_of_layer)
            try:
                layer = make_layer(config_of_layer)
            except ConfigError as error:
                said.append(str(error))
            else:
                said.append(type(layer.token_dispatcher).__name__)
    return said


def test_a_layer_that_cannot_be_served_is_an_error(two_ranks: RankPool) -> None:
    for refused, kept in two_ranks.run(build_unserved, {"activation_func": torch.tanh}):
        assert refused.startswith("the activation function cannot be honoured by --moe-token-disp")
        way_back = "(FLASHMOE_REPLACES=alltoall puts flashmoe in the place of alltoall: unset"
        assert way_back in refused
        assert kept == "MoEAlltoAllTokenDispatcher"


def config_of(name: str = "alltoall", **fields: Any) -> Any:
    return SimpleNamespace(moe_token_dispatcher_type=name, num_moe_experts=8, **fields)


def test_only_the_dispatchers_that_are_named_are_replaced() -> None:
    for value, ours in (
        ("", ["flashmoe"]),
        ("alltoall", ["flashmoe", "alltoall"]),
        ("allgather, flex", ["flashmoe", "allgather", "flex"]),
    ):
        with replacing(value):
            names = ("flashmoe", "alltoall", "allgather", "flex", None)
            assert [name for name in names if is_ours(config_of(name))] == ours


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"transformer_impl": "inference_optimized"}, "inference_optimized, is for inference"),
        ({"moe_megakernel_backend": "mok"}, "its moe_megakernel_backend computes the layer"),
    ],
    ids=str,
)
def test_models_that_are_not_trained_are_left_alone(fields: dict[str, str], why: str) -> None:
    with replacing("alltoall"):
        assert not is_ours(config_of(**fields))
        assert f"FLASHMOE_REPLACES=alltoall leaves a MoE layer alone: {why}" in (
            about(config_of(**fields)).replace("its transformer_impl, ", "")
        )


def test_exports_and_inference_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with replacing("alltoall"):
        with torch.inference_mode():
            assert not is_ours(config_of())
            assert "torch.inference_mode" in about(config_of())
        assert is_ours(config_of())
        args = SimpleNamespace(modelopt_enabled=True)
        monkeypatch.setattr(dispatcher_module, "megatron_args", lambda: args)
        assert not is_ours(config_of())
        assert about(config_of()).endswith("alone: ModelOpt's models are for export")


def test_a_configuration_opts_out_before_it_is_used() -> None:
    with replacing("alltoall"):
        config = config_of()
        keep_dispatcher(config)
        for each in (config, copy.copy(config), copy.deepcopy(config)):
            assert not is_ours(each)
            assert about(each).endswith("alone: its configuration has opted out")
        used = config_of()
        note_served(used)
        with pytest.raises(ConfigError, match="of this configuration runs on flashmoe already"):
            keep_dispatcher(used)
        keep_dispatcher(copy.deepcopy(used))
        with pytest.raises(ConfigError, match="moe_token_dispatcher_type is flashmoe; wanted all"):
            keep_dispatcher(config_of("flashmoe"))
    assert is_ours(used), "a layer that was built stays what it is"


def test_inputs_outlive_a_layer_of_ours_under_another_name() -> None:
    module = SimpleNamespace(
        should_free_input=lambda name, is_moe, config: is_moe,
        build_transformer_layer_callables=lambda layer: layer.config.moe_token_dispatcher_type,
    )
    patch_schedule(module)  # type: ignore[arg-type]
    with replacing("flex"):
        assert module.should_free_input("mlp", True, config_of("flex")) is False
        assert module.should_free_input("mlp", True, config_of("alltoall")) is True
    fused = SimpleNamespace(flashmoe_routed_experts=None)
    for mlp, name in ((fused, "alltoall"), (SimpleNamespace(), "flex")):
        layer = SimpleNamespace(config=config_of("flex"), mlp=mlp)
        assert module.build_transformer_layer_callables(layer) == name
        assert layer.config.moe_token_dispatcher_type == "flex"


@pytest.mark.parametrize(
    ("name", "fields", "words"),
    [
        (
            "flex",
            {"moe_expert_rank_capacity_factor": 1.5},
            r"--moe-expert-rank-capacity-factor \(moe_expert_rank_capacity_factor=1.5\) cannot be "
            r".*it drops the rows .*ask for the bound with moe_token_dispatcher_type flashmoe",
        ),
        (
            "alltoall",
            {
                "recompute_granularity": "selective",
                "recompute_modules": ["layernorm"],
                "cuda_graph_impl": "transformer_engine",
                "cuda_graph_modules": ["moe_router", "moe_preprocess"],
            },
            "--recompute-modules layernorm beside a CUDA graph .*Megatron frees the norm's output",
        ),
    ],
)
def test_what_means_another_thing_is_refused(name: str, fields: dict[str, Any], words: str) -> None:
    with replacing("alltoall,flex"):
        with pytest.raises(ConfigError, match=words):
            refuse(config_of(name, **fields), OTHER_MEANINGS)
        refuse(config_of("flashmoe", **fields), OTHER_MEANINGS)
        refuse(config_of(name), OTHER_MEANINGS)


def test_settings_that_are_shown_come_back() -> None:
    config = config_of("flex", kept=1)
    with showing(config, {"kept": 2, "unknown": 3}):
        assert config.kept == 2
    assert config.kept == 1
    assert not hasattr(config, "unknown")


def test_what_has_no_effect_is_said() -> None:
    args = SimpleNamespace(moe_token_dispatcher_type="alltoall", num_experts=None)
    with replacing("alltoall"):
        wanted = "FLASHMOE_REPLACES=alltoall is without effect: the model has no experts"
        assert list(find_notices(args)) == [wanted]
        assert not is_served(args)
        args.num_experts = 8
        assert list(find_notices(args)) == []
        assert is_served(args)
        assert about(config_of("flashmoe")) == (
            "FLASHMOE_REPLACES=alltoall changes nothing here: the dispatcher is flashmoe by its "
            "own name"
        )
        assert about(config_of("flex")).endswith("leaves a MoE layer alone: its dispatcher is flex")
    assert about(config_of()) == ""
    with replacing("flex"):
        assert "DeepEP, HybridEP and NCCL EP have no effect" in about(config_of("flex"))


@pytest.mark.parametrize("value", ["all2all", "alltoall,flashmoe"])
def test_an_unknown_name_is_refused(value: str) -> None:
    wanted = "wanted alltoall, allgather, flex or several"
    with replacing(value), pytest.raises(ConfigError, match=wanted):
        replaced()
    with replacing(value), pytest.raises(ConfigError, match=wanted):
        adapter.attach()
    with replacing(value):
        assert wanted in environment().problem


def test_torch_that_loads_no_plugins_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(dispatcher_module.TORCH_LOADS, "0")
    monkeypatch.setattr(adapter, "_is_attached", False)
    with replacing("alltoall"):
        with pytest.raises(ConfigError, match="has no effect with TORCH_DEVICE_BACKEND_AUTOLOAD=0"):
            adapter.configure()
        assert "has no effect with TORCH_DEVICE_BACKEND_AUTOLOAD=0" in environment().problem
        adapter.attach()
        adapter.configure()
    assert environment().problem == ""


def bridge(**functions: Any) -> Any:
    return SimpleNamespace(__name__="megatron.bridge.training.model_load_save", **functions)


def test_bridge_exports_with_its_own_layers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    release = ["0.6.2"]
    monkeypatch.setattr("importlib.metadata.version", lambda _: release[0])
    for version, words in (("0.6.2", ""), ("0.7.0", "Megatron-Bridge 0.7.0 is newer than the")):
        release[0] = version
        module = bridge(build_and_load_model=lambda path, model_cfg, *_: is_ours(model_cfg))
        with replacing("alltoall"):
            patch_loading(module)
            assert words in caplog.text
            assert bool(caplog.text) == bool(words)
            config = config_of()
            assert is_ours(config)
            assert not module.build_and_load_model("folder", config, "gpt")
            assert not module.build_and_load_model("folder", model_cfg=config_of())
            assert module.build_and_load_model("folder", config_of("flashmoe"))
            holder = SimpleNamespace(transformer=config_of())
            module.build_and_load_model("folder", holder)
            assert not is_ours(holder.transformer)
    with replacing("alltoall"), pytest.raises(ConfigError, match="has no build_and_load_model in"):
        patch_loading(bridge())
    with replacing(""):
        patch_loading(bridge())


@pytest.mark.parametrize(
    ("patch", "name", "parameter"),
    [
        (patch_dropping, "apply_moe_token_drop", "model_provider"),
        (patch_flex, "apply_flex_dispatcher_backend", "model_config"),
    ],
)
def test_checks_and_writers_of_bridge_leave_our_name(patch: Any, name: str, parameter: str) -> None:
    def checks_and_writes(config: Any, number: int = 0) -> int:
        assert config.moe_token_dispatcher_type == "alltoall"
        config.moe_token_dispatcher_type = "flex"
        config.moe_expert_capacity_factor = 1.5
        return number

    taken = checks_and_writes.__code__.co_varnames
    code = checks_and_writes.__code__.replace(co_varnames=(parameter, *taken[1:]))
    module = bridge(**{name: FunctionType(code, globals(), name, checks_and_writes.__defaults__)})
    patch(module)
    ours, stock = config_of("flashmoe"), config_of()
    assert getattr(module, name)(ours, number=3) == 3
    assert getattr(module, name)(**{parameter: stock}) == 0
    assert (ours.moe_token_dispatcher_type, ours.moe_expert_capacity_factor) == ("flashmoe", 1.5)
    assert stock.moe_token_dispatcher_type == "flex"  # a name that is Megatron's is Bridge's to set


def test_overlaps_of_bridge_take_our_name() -> None:
    class CommOverlapConfig:
        def _get_model_comm_overlap_cfgs(self, model_cfg: Any, ddp_config: Any) -> Any:
            config = getattr(model_cfg, "transformer", model_cfg)
            assert config.moe_token_dispatcher_type == "alltoall"
            return ddp_config

    patch_overlaps(bridge(CommOverlapConfig=CommOverlapConfig))
    config = config_of("flashmoe")
    for given in (config, SimpleNamespace(transformer=config)):
        assert CommOverlapConfig()._get_model_comm_overlap_cfgs(given, 5) == 5
    assert config.moe_token_dispatcher_type == "flashmoe"


AUTOLOAD = """
from flashmoe_megatron.autoload import autoload
autoload()  # as torch does at its import
from megatron.core.transformer.moe.moe_layer import MoELayer
from flashmoe_megatron.errors import ConfigError
print(hasattr(MoELayer.dispatch, "_flashmoe_original"))
try:
    MoELayer(None)
except ConfigError as error:
    print(error)
except AssertionError as error:
    assert "group is not initialized" in str(error)  # Megatron's own
"""


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"FLASHMOE_REPLACES": "alltoall"}, ["True"]),
        ({"FLASHMOE_REPLACES": "alltoall", "FLASHMOE_AUTOLOAD": "1"}, ["True"]),
        (
            {"FLASHMOE_REPLACES": "alltoall", "FLASHMOE_AUTOLOAD": "0"},
            [
                "False",
                "FLASHMOE_REPLACES=alltoall installs flashmoe and FLASHMOE_AUTOLOAD=0 does not: "
                "unset one of them",
            ],
        ),
        (
            {"FLASHMOE_REPLACES": "nccl"},
            [
                "False",
                "FLASHMOE_REPLACES='nccl': wanted alltoall, allgather, flex or several of them "
                "with commas, got 'nccl'",
            ],
        ),
    ],
    ids=str,
)
def test_the_variable_implies_autoload(
    environment: dict[str, str], said: list[str], with_megatron: Path
) -> None:
    ran = run_python("-c", AUTOLOAD, forked_from=with_megatron, **environment)
    assert ran.stdout.splitlines() == said


PROGRAM = """
import torch.multiprocessing


def build(rank):
    import torch.distributed as dist
    from examples import cpu_bridge

    cpu_bridge.enable()
    dist.init_process_group("gloo", init_method=f"file://{__file__}.store", rank=rank, world_size=2)
    from megatron.core import parallel_state
    from tests.megatron.harness import Layout, transformer_config
    from tests.megatron.layers import make_layer

    parallel_state.initialize_model_parallel(
        expert_model_parallel_size=2, expert_tensor_parallel_size=1
    )
    for _ in range(2):
        layer = make_layer(transformer_config(Layout(expert=2), "alltoall"))
    assert type(layer.token_dispatcher).__name__ == "FlashMoETokenDispatcher"


if __name__ == "__main__":
    torch.multiprocessing.spawn(build, nprocs=2)
"""


def test_spawned_processes_replace_and_each_says_so_once(tmp_path: Path) -> None:
    """Torch loads what is registered for it in every process; the program imports nothing of us."""
    try:
        importlib.metadata.distribution("flashmoe-megatron")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("flashmoe-megatron is not installed, only importable")
    (tmp_path / "program.py").write_text(PROGRAM)
    ran = run_python(tmp_path / "program.py", FLASHMOE_REPLACES="alltoall")
    for rank in range(2):
        line = (
            f"flashmoe: rank {rank}: FLASHMOE_REPLACES=alltoall: MoE layers of alltoall run on "
            "flashmoe\n"
        )
        assert ran.stdout.count(line) == 1


@pytest.mark.parametrize("name", ["alltoall", "flex"])
def test_published_recipes_of_bridge_are_accepted_in_another_place(name: str) -> None:
    """The page's table says of them what a configuration of our own name meets."""
    sources = (recipes.BRIDGE, recipes.BRIDGE_PERF)
    of_bridge = [each.settings for each in published() if each.source in sources]
    assert len(of_bridge) == 16
    with replacing("alltoall,flex"):
        for settings in of_bridge:
            config = SimpleNamespace(moe_token_dispatcher_type=name, **settings)
            refuse(config, OTHER_MEANINGS)
