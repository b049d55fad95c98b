"""Why a machine, an engine or a group cannot serve a layer: pure functions."""

import pytest
import torch

from flashmoe_megatron.adapters.deepspeed import refusals
from flashmoe_megatron.adapters.deepspeed.forwards import Watched
from flashmoe_megatron.adapters.deepspeed.layers import LayerInfo
from flashmoe_megatron.adapters.deepspeed.settings import Settings
from flashmoe_megatron.errors import DeviceError
from tests.unit import cases

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def info(**changes) -> LayerInfo:
    watched = Watched(torch.nn.Identity())
    wanted = {"shape": cases.CONFIG, "group": None, "dtype": torch.bfloat16, "watched": watched}
    wanted |= {"form": None, "is_split": True}
    return LayerInfo(**{**wanted, **changes})


def test_processors_run_the_reference() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert refusals.layer_problem(info(dtype=dtype), Settings(), CPU) is None
    for biases in ((True, True), (True, False), (False, True)):
        assert refusals.layer_problem(info(biases=biases), Settings(), CPU) is None


def test_other_dtypes_are_refused() -> None:
    problem = refusals.layer_problem(info(dtype=torch.float64), Settings(), CPU)
    assert problem is not None
    assert "float64, wanted bfloat16, float16 or float32; enable bf16 or fp16" in problem


def test_the_kernel_is_refused_without_a_hopper_gpu() -> None:
    problem = refusals.layer_problem(info(), Settings(backend="kernel"), CPU)
    assert problem is not None
    assert "needs a Hopper GPU" in problem
    assert "found the device 'cpu'" in problem


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)])
def test_what_the_kernel_does_not_serve_is_scheduled(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert refusals.layer_problem(info(dtype=torch.float32), Settings(), GPU) is None
    if capability != (9, 0):
        assert refusals.layer_problem(info(biases=(True, False)), Settings(), GPU) is None
    problem = refusals.layer_problem(info(dtype=torch.float32), Settings(backend="kernel"), GPU)
    assert "float32 and the kernel" in str(problem) or "found Some GPU" in str(problem)


def test_what_the_kernel_does_not_compute_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashmoe_megatron.kernel import bindings

    monkeypatch.setattr(refusals, "resolve_kind", lambda kind, device, dtype: "kernel")
    monkeypatch.setattr(bindings, "load", lambda: None)

    def problem(**changes) -> str | None:
        return refusals.layer_problem(info(**changes), Settings(), GPU)

    assert problem() is None
    assert problem(dtype=torch.float16) is None
    assert problem(biases=(True, True)) is None
    assert "enable bf16 or fp16 in the DeepSpeed configuration" in str(problem(dtype=torch.float32))
    assert "a bias in the first projection and none in the second" in str(
        problem(biases=(True, False))
    )
    assert "a bias in the second projection and none in the first" in str(
        problem(biases=(False, True))
    )

    def fail() -> None:
        raise DeviceError("no library")

    monkeypatch.setattr(bindings, "load", fail)
    assert problem() == "no library"


def test_what_experts_in_fp8_cannot_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Settings(experts="fp8")
    wide = cases.make_config(hidden=128, intermediate=128)
    assert refusals.layer_problem(info(shape=wide), asked, CPU) is None
    for changes, settings, words in (
        ({}, asked, "hidden=64: wanted a multiple of 128"),
        ({"shape": wide, "dtype": torch.float16}, asked, "weights in torch.float16: wanted bf"),
        ({"shape": wide, "biases": (True, True)}, asked, "with biases: wanted none"),
        ({"shape": wide}, Settings(experts="fp8", spare_slots=1), "wanted spare_slots=0"),
    ):
        assert words in str(refusals.layer_problem(info(**changes), settings, CPU))
    monkeypatch.setattr(refusals, "resolve_kind", lambda kind, device, dtype: "kernel")
    paired = cases.make_config(hidden=128, intermediate=128, glu_interleave=1)
    problem = refusals.layer_problem(info(shape=paired), asked, GPU)
    assert "experts='fp8' with glu_interleave=1 on the backend 'kernel'" in str(problem)


def test_groups_lie_in_blocks_of_hosts() -> None:
    hosts = {0: "a", 1: "a", 2: "b", 3: "b", 4: "a"}
    for ranks in ([0, 1], [0, 2], [0, 1, 2, 3]):
        assert refusals.hosts_problem(ranks, hosts, Settings()) is None
    for ranks, said in (
        ([0, 2, 4], "ranks of a host are not neighbours"),
        ([0, 1, 2], "different numbers of its ranks"),
    ):
        problem = refusals.hosts_problem(ranks, hosts, Settings())
        assert problem is not None
        assert said in problem
    problem = refusals.hosts_problem([0, 2], hosts, Settings(spare_slots=1))
    assert problem is not None
    assert "spans 2 hosts of one rank, which has all" in problem
    assert refusals.hosts_problem([0, 1, 2, 3], hosts, Settings(spare_slots=1)) is None
    assert refusals.hosts_problem([0, 1], hosts, Settings(spare_slots=1)) is None
    assert refusals.hosts_problem([0, 2], hosts, Settings(spare_slots=1, placement="off")) is None


def test_replicas_are_refused_where_weights_come_and_go() -> None:
    from flashmoe_megatron.adapters.deepspeed.experts import ExpertForm
    from flashmoe_megatron.config import Activation

    plain_form = ExpertForm(64, 64, Activation.GELU, False, ("w1",), "w2")
    plain = info(is_split=plain_form.is_split)
    split_form = ExpertForm(64, 64, Activation.SILU, True, ("w1", "w3"), "w2")
    turned_form = ExpertForm(64, 64, Activation.SILU, True, ("w1",), "w2", up_first=True)
    asked = Settings(spare_slots=1)
    assert refusals.replicas_problem(plain, 2, asked) is None
    for given, stage, settings, wanted in (
        (plain, 3, asked, "with ZeRO stage 3, which frees"),
        *(
            (info(is_split=form.is_split), 1, asked, "are not one parameter with the gate first")
            for form in (split_form, turned_form)
        ),
        (plain, 1, Settings(spare_slots=1, placement="lookahead"), 'wanted "launch" or "off"'),
    ):
        problem = refusals.replicas_problem(given, stage, settings)
        assert problem is not None
        assert wanted in problem
        assert refusals.replicas_problem(given, stage, Settings()) is None
    problem = refusals.layer_problem(info(), Settings(spare_slots=9), CPU)
    assert problem is not None
    assert "spare_slots=9: wanted at most 8" in problem
