"""Which backend is chosen, what is said about it, and ranks that mean different layers."""

import dataclasses
import logging
import re
import socket
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from flashmoe_megatron import FlashMoELayer, driver_release
from flashmoe_megatron.config import KEEPS, Activation
from flashmoe_megatron.errors import ConfigError, DeviceError, FlashMoEError
from flashmoe_megatron.kernel import bindings
from flashmoe_megatron.multipath import Multipath
from flashmoe_megatron.options import BackendOptions
from flashmoe_megatron.select import _announce, _announce_once, resolve_kind, select_backend
from flashmoe_megatron.separate.backend import ScheduledBackend
from flashmoe_megatron.separate.reference import ReferenceBackend
from tests.distributed import RankPool, refusal
from tests.unit import cases


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch):
    """Makes torch report a GPU of some kind; nothing is run on it."""

    def pretend(name: str, capability: tuple[int, int]) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)

    return pretend


@pytest.fixture(autouse=True)
def _nothing_announced_yet():
    _announce.cache_clear()


BROKEN = 131
"""SMs reserved, with which the class below cannot be made."""


class BrokenKernelError(RuntimeError):
    pass


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Puts a recording class in the kernel's place: no GPU is needed to see it chosen."""
    made: list[tuple[Any, ...]] = []

    class KernelBackend:
        reads_tokens = False

        def __init__(self, config, group, device, *, options):
            if options.reserved_sms == BROKEN:
                raise BrokenKernelError("cannot load")
            self.keep = options.keep
            made.append((config, group, device, options))

    module = ModuleType("flashmoe_megatron.kernel.backend")
    module.KernelBackend = KernelBackend
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return made


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_auto_takes_the_reference_on_a_cpu_and_says_so_once(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO, logger="flashmoe_megatron"):
        for _ in range(3):
            backend = select_backend(cases.CONFIG, None, "cpu", keep="all")
            assert isinstance(backend, ReferenceBackend)
    (message,) = messages(caplog)
    assert "reference" in message
    assert "needs a Hopper GPU; found the device 'cpu'" in message


def test_layers_of_two_dtypes_are_one_choice(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO, logger="flashmoe_megatron"):
        for dtype in (None, torch.bfloat16, torch.float32):
            select_backend(cases.CONFIG, None, "cpu", dtype=dtype, keep="all")
    assert len(messages(caplog)) == 1


@pytest.mark.parametrize(
    ("name", "capability", "dtype", "found"),
    [
        ("NVIDIA A100-SXM4-80GB", (8, 0), None, "A100-SXM4-80GB (compute capability 8.0)"),
        ("NVIDIA H200", (9, 0), torch.float32, "(compute capability 9.0) and torch.float32"),
    ],
)
def test_auto_takes_the_scheduled_backend_where_the_kernel_does_not_serve(
    gpu, monkeypatch, caplog, name, capability, dtype, found
):
    gpu(name, capability)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    with caplog.at_level(logging.INFO, logger="flashmoe_megatron"):
        backend = select_backend(cases.CONFIG, None, "cuda", dtype=dtype, keep="all")
    assert isinstance(backend, ScheduledBackend)
    (message,) = messages(caplog)
    assert message.startswith("MoE backend: scheduled")
    assert found in message


def test_auto_chooses_by_the_dtype_that_a_layer_computes_in(gpu, kernel):
    gpu("NVIDIA H200", (9, 0))
    device = torch.device("cuda")
    for dtype in (None, torch.bfloat16, torch.float16):
        assert resolve_kind("auto", device, dtype) == "kernel"
    for dtype in (torch.float32, torch.float64):
        assert resolve_kind("auto", device, dtype) == "scheduled"
        assert resolve_kind("auto", torch.device("cpu"), dtype) == "reference"
        assert resolve_kind("kernel", device, dtype) == "kernel", "which then refuses the dtype"


def test_the_reference_on_a_gpu_says_that_it_is_slow(gpu, caplog: pytest.LogCaptureFixture):
    gpu("NVIDIA A100-SXM4-80GB", (8, 0))
    _announce_once.cache_clear()
    select_backend(cases.CONFIG, None, "cuda", kind="reference")
    assert "the reference on a GPU waits for its host at every step" in messages(caplog)[-1]


def test_auto_says_that_there_is_no_gpu(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    select_backend(cases.CONFIG, None, "cuda")
    assert messages(caplog) == [
        "MoE backend: the reference in plain torch, because the kernel needs a Hopper GPU; found "
        "no usable CUDA GPU"
    ]


def test_auto_takes_the_kernel_on_hopper(gpu, kernel, caplog: pytest.LogCaptureFixture):
    gpu("NVIDIA H200", (9, 0))
    with caplog.at_level(logging.INFO, logger="flashmoe_megatron"):
        select_backend(cases.CONFIG, None, "cuda:0", timeout=3.0)
    assert kernel == [(cases.CONFIG, None, torch.device("cuda:0"), BackendOptions(timeout=3.0))]
    assert "NVIDIA H200 (compute capability 9.0)" in messages(caplog)[0]


@pytest.mark.parametrize("kind", ["auto", "kernel"])
def test_a_kernel_that_fails_is_not_replaced(gpu, kernel, kind: str):
    gpu("NVIDIA H200", (9, 0))
    with pytest.raises(BrokenKernelError):
        select_backend(cases.CONFIG, None, "cuda", kind=kind, reserved_sms=BROKEN)


def test_the_reference_can_be_asked_for_on_hopper(gpu, kernel):
    gpu("NVIDIA H200", (9, 0))
    backend = select_backend(cases.CONFIG, None, "cuda", kind="reference", timeout=3.0)
    assert isinstance(backend, ReferenceBackend)
    assert kernel == []


def test_the_kernel_is_refused_on_a_cpu():
    with pytest.raises(DeviceError, match="needs a Hopper GPU .* found the device 'cpu'"):
        select_backend(cases.CONFIG, None, "cpu", kind="kernel")


def test_the_kernel_is_refused_on_another_gpu_by_name(gpu):
    gpu("NVIDIA B200", (10, 0))
    with pytest.raises(DeviceError, match=r"found NVIDIA B200 \(compute capability 10.0\)"):
        select_backend(cases.CONFIG, None, "cuda", kind="kernel")


def test_unknown_kind():
    wanted = "wanted one of auto, kernel, scheduled, reference"
    with pytest.raises(ConfigError, match=f"backend 'cuda': {wanted}"):
        select_backend(cases.CONFIG, None, "cpu", kind="cuda")


def select_with(group: dist.ProcessGroup, changes: list[dict[str, Any]]) -> str:
    config = cases.make_config(num_ranks=2, **changes[dist.get_rank(group)])
    try:
        select_backend(config, group, "cpu")
    except ConfigError as error:
        return str(error)
    return "agreed"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ([{}, {}], "agreed"),
        ([{}, {"hidden": 128}], "disagree on hidden: 64 on rank 0, 128 on rank 1"),
        ([{"topk": 1}, {}], "disagree on topk: 1 on rank 0, 2 on rank 1"),
        ([{}, {"max_tokens": 9}], "disagree on max_tokens: 512 on rank 0, 9 on rank 1"),
        ([{"gated": False}, {}], "disagree on gated: False on rank 0, True on rank 1"),
        ([{}, {"activation": Activation.RELU}], "disagree on activation: "),
    ],
)
def test_ranks_must_agree(ranks: RankPool, changes: list[dict[str, Any]], said: str):
    for answer in ranks.run(select_with, changes, num_ranks=2):
        assert said in answer


def select_with_options(group: dist.ProcessGroup, options: list[dict[str, Any]]) -> str:
    try:
        select_backend(
            cases.make_config(num_ranks=2), group, "cpu", **options[dist.get_rank(group)]
        )
    except ConfigError as error:
        return str(error)
    return "agreed"


def test_ranks_must_agree_on_what_is_kept(ranks: RankPool):
    """A backward exchanges other rows with a rank that has kept its own."""
    said = "the ranks disagree on keep: all on rank 0, inputs on rank 1; wanted one value"
    options = [{"keep": "all"}, {"keep": "inputs"}]
    assert ranks.run(select_with_options, options, num_ranks=2) == [said] * 2
    assert ranks.run(select_with_options, options[1:] * 2, num_ranks=2) == ["agreed"] * 2


def test_ranks_must_agree_on_when_they_give_up(ranks: RankPool):
    """Behind a fault all go on with NaN until the timeout, and then all make new memory."""
    said = "the ranks disagree on timeout: 120.0 on rank 0, 60.0 on rank 1; wanted one value"
    options = [{}, {"timeout": 60.0}]
    assert ranks.run(select_with_options, options, num_ranks=2) == [said] * 2


@pytest.mark.parametrize("kind", ["auto", "kernel"])
def test_a_driver_that_is_too_old_is_named_with_the_library(
    kind: str, gpu: Callable[..., None], monkeypatch: pytest.MonkeyPatch
):
    gpu("NVIDIA H100", (9, 0))
    old = driver_release.Driver("570.86.15", (12, 8))
    monkeypatch.setattr(driver_release, "find_driver", lambda: old)
    driver_release.driver_problem.cache_clear()
    said = (
        f"{bindings.library_path()} cannot run here, since the driver 570.86.15 runs CUDA up to "
        "12.8: the kernel needs CUDA 13, wanted a driver 580 or newer; or choose the backend "
        "'scheduled'"
    )
    try:
        with pytest.raises(DeviceError, match=f"^{re.escape(said)}$"):
            select_backend(cases.make_config(), None, "cuda:0", kind=kind)
    finally:
        driver_release.driver_problem.cache_clear()


def select_on_hosts(
    group: dist.ProcessGroup,
    hosts: list[str],
    *,
    lacks_library: bool = False,
    in_fp8: bool = False,
    **options: Any,
) -> str:
    """Selects the kernel, with a class in its place, on ranks of these hosts."""
    shape = {"hidden": 128, "intermediate": 128, "experts": "fp8"} if in_fp8 else {}
    config = cases.make_config(num_ranks=len(hosts), num_experts=24, **shape)
    kernel = ModuleType("flashmoe_megatron.kernel.backend")
    missing = DeviceError("libflashmoe.so is not installed") if lacks_library else None
    kernel.KernelBackend = mock.Mock(side_effect=missing)
    with (
        mock.patch.object(socket, "gethostname", return_value=hosts[dist.get_rank(group)]),
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        mock.patch.object(torch.cuda, "get_device_name", return_value="NVIDIA H200"),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0)),
        mock.patch.dict(sys.modules, {kernel.__name__: kernel}),
    ):
        try:
            select_backend(config, group, "cuda", **options)
        except FlashMoEError as error:
            return str(error)
    return "selected"


def select_with_memory(group: dist.ProcessGroup, hosts: list[str], memories: list[str]) -> str:
    return select_on_hosts(group, hosts, symmetric_memory=memories[dist.get_rank(group)])


@pytest.mark.parametrize(
    ("hosts", "memories", "said"),
    [
        (["a", "a"], ["cuda", "cuda"], r"^selected$"),
        (["a", "a"], ["cuda", "nvshmem"], r"disagree on symmetric_memory: cuda on rank 0, nvshme"),
    ],
)
def test_the_kernel_shares_one_kind_of_memory(
    ranks: RankPool, hosts: list[str], memories: list[str], said: str
):
    for answer in ranks.run(select_with_memory, hosts, memories, num_ranks=2):
        assert re.search(said, answer)


def select_over_hosts(group: dist.ProcessGroup) -> list[str]:
    return [
        select_on_hosts(group, ["a", "b"], in_fp8=True, **options)
        for options in ({}, {"combine": "routes"})
    ]


def test_the_kernel_over_hosts_computes_fp8_but_not_by_route(ranks: RankPool):
    for plain, by_route in ranks.run(select_over_hosts, num_ranks=2):
        assert plain == "selected"
        assert by_route.startswith("experts='fp8' on the kernel with combine='routes', which no")


@pytest.mark.parametrize("kind", ["kernel", "reference"])
def test_hosts_have_blocks_of_ranks(ranks: RankPool, kind: str):
    for answer in ranks.run(select_in_turn, kind, num_ranks=3):
        assert "ranks of a host are not neighbours (its ranks 0 to 0 on a" in answer
        assert "--expert-model-parallel-size" in answer


def select_in_turn(group: dist.ProcessGroup, kind: str) -> str:
    return select_on_hosts(group, ["a", "b", "a"], kind=kind)


def test_group_size_must_fit():
    with pytest.raises(ConfigError, match="num_ranks=2, but the process group has 1 ranks"):
        select_backend(cases.make_config(num_ranks=2), None, "cpu")


def select_as(group: dist.ProcessGroup, choices: list[dict[str, Any]]) -> str:
    """Makes a layer of two ranks, each with a choice of its own."""
    config = cases.make_config(num_ranks=2, glu_interleave=32)
    choice = {"backend": "reference", "device": "cpu", **choices[dist.get_rank(group)]}
    others = {"of another layer": cases.make_config(), "of one like it": config}
    if (other := others.get(choice["backend"])) is not None:
        within = group if other is config else None
        choice["backend"] = ReferenceBackend(other, within, device=torch.device("cpu"))
    return refusal(group, lambda group: FlashMoELayer(config, group=group, **choice))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"backend": "kernel"}, "DeviceError: rank 1: the kernel needs a Hopper GPU"),
        ({"backend": "cuda"}, "ConfigError: rank 1: backend 'cuda': wanted one of"),
        ({"keep": "some"}, "ConfigError: rank 1: keep='some': wanted one of"),
        ({"placement": "lookahead"}, "ConfigError: rank 1: placement='lookahead': "),
        ({"dtype": torch.int8}, "ConfigError: rank 1: dtype torch.int8: wanted one of torch.bf"),
        ({"fuse_router": True}, "ConfigError: rank 1: fuse_router=True without a router: wanted"),
        ({"split": True}, "ConfigError: rank 1: split=True with gated=True, glu_interleave=32: "),
        ({"device": "gpu"}, "DeviceError: rank 1: there is no device 'gpu'"),
        ({"device": "xpu"}, "DeviceError: rank 1: the device 'xpu' cannot be used: "),
        ({"backend": "of another layer"}, "ConfigError: rank 1: the backend was made for MoECon"),
        (
            {"backend": "of another layer", "keep": "all"},
            "ConfigError: rank 1: keep beside a backend that is given: wanted its own",
        ),
    ],
)
def test_what_one_rank_cannot_serve_is_refused_on_every_rank(
    ranks: RankPool, wrong: dict[str, Any], said: str
):
    for answer in ranks.run(select_as, [{}, wrong], num_ranks=2):
        assert answer.startswith(said)


def test_a_backend_that_one_rank_alone_is_given(ranks: RankPool):
    for answer in ranks.run(select_as, [{}, {"backend": "of one like it"}], num_ranks=2):
        assert answer == (
            "ConfigError: the ranks disagree on backend: its own on rank 0, another layer's on "
            "rank 1; wanted one value"
        )


def test_what_one_rank_refuses_on_meta_is_refused_on_every_rank(ranks: RankPool):
    right = {"device": "meta"}
    for answer in ranks.run(select_as, [right, {**right, "keep": "some"}], num_ranks=2):
        assert answer.startswith("ConfigError: rank 1: keep='some': wanted one of")


def select_without_library(group: dist.ProcessGroup, hosts: list[str]) -> str:
    return select_on_hosts(group, hosts, lacks_library=dist.get_rank(group) == 1)


@pytest.mark.parametrize("hosts", [["a", "a"], ["a", "b"]])
def test_a_library_that_one_rank_lacks_ends_the_call_on_every_rank(
    ranks: RankPool, hosts: list[str]
):
    for answer in ranks.run(select_without_library, hosts, num_ranks=2):
        assert answer == "rank 1: libflashmoe.so is not installed"


def select_with_few_sms(group: dist.ProcessGroup) -> str:
    reserved = 4 - 4 * dist.get_rank(group)
    return select_on_hosts(group, ["a", "b"], host_overlap=1, reserved_sms=reserved)


def test_multiprocessors_that_one_rank_does_not_reserve(ranks: RankPool):
    for answer in ranks.run(select_with_few_sms, num_ranks=2):
        assert answer.startswith("rank 1: host_overlap=1 with reserved_sms=0: wanted at least 4")


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    missing = mock.Mock(side_effect=AssertionError("Invalid device id"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", missing)
    with pytest.raises(DeviceError, match="'cuda:9' cannot be used: Invalid device id"):
        select_backend(cases.CONFIG, None, "cuda:9")


def refusals_outside(group: dist.ProcessGroup) -> list[str]:
    """What a rank is told that is in none of the groups that it gives."""
    other = dist.new_group([0])
    mesh = DeviceMesh("cpu", [0])
    said = []
    if dist.get_rank() == 1:
        for make in (
            lambda: FlashMoELayer(cases.CONFIG, group=other, device="cpu"),
            lambda: FlashMoELayer(cases.CONFIG, group=mesh, device="cpu"),
            lambda: select_backend(cases.CONFIG, other, "cpu"),
            lambda: select_backend(cases.CONFIG, None, "cpu", tensor_group=other),
            lambda: Multipath(other),
            lambda: FlashMoELayer(cases.CONFIG, group=[0, 1], device="cpu"),
        ):
            with pytest.raises(ConfigError) as raised:
                make()
            said.append(str(raised.value))
    dist.barrier(group)
    if dist.get_rank() == 0:
        dist.destroy_process_group(other)
    return said


def test_groups_that_a_rank_is_not_in(ranks: RankPool):
    _, said, *_ = ranks.run(refusals_outside)
    names = ["group=-100", "group=DeviceMesh", "group=-100", "tensor_group=-100", "group=-100"]
    for name, sentence in zip([*names, "group=[0, 1]"], said, strict=True):
        assert sentence.startswith(name)
        assert "is no group of this rank: wanted a process group" in sentence


def announce_count(group: dist.ProcessGroup) -> int:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("flashmoe_megatron").addHandler(handler)
    _announce.cache_clear()
    for _ in range(2):
        select_backend(cases.make_config(num_ranks=2), group, "cpu")
    logging.getLogger("flashmoe_megatron").removeHandler(handler)
    return len(records)


def test_rank_zero_alone_announces(ranks: RankPool):
    assert ranks.run(announce_count, num_ranks=2) == [1, 0]


@pytest.mark.parametrize("kind", ["kernel", "reference"])
def test_the_backend_is_told_what_to_keep(gpu, kernel, kind: str):
    gpu("NVIDIA H200", (9, 0))
    for keep in KEEPS:
        assert select_backend(cases.CONFIG, None, "cuda", kind=kind, keep=keep).keep == keep


def test_sizes_decide_what_is_kept_and_the_log_says_so(caplog: pytest.LogCaptureFixture):
    _announce_once.cache_clear()
    for intermediate, keep in ((cases.CONFIG.intermediate, "all"), (8192, "preactivations")):
        config = dataclasses.replace(cases.CONFIG, intermediate=intermediate)
        with caplog.at_level("INFO", "flashmoe_megatron"):
            assert select_backend(config, None, "cpu", kind="reference").keep == keep
        assert f"keep auto is {keep}: to fetch rows again would take" in caplog.messages[-1]
    said = len(caplog.messages)
    assert select_backend(config, None, "cpu", kind="reference", keep="all").keep == "all"
    assert len(caplog.messages) == said


def test_the_log_says_where_no_rows_are_kept(
    gpu, kernel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    gpu("NVIDIA H200", (9, 0))
    _announce_once.cache_clear()
    backend = sys.modules["flashmoe_megatron.kernel.backend"].KernelBackend
    for reads_tokens, words in (
        (False, "keep auto is all: to fetch rows again would take"),
        (True, "keep auto is preactivations: a backward on one GPU takes what it needs of rows"),
    ):
        monkeypatch.setattr(backend, "reads_tokens", reads_tokens)
        with caplog.at_level("INFO", "flashmoe_megatron"):
            select_backend(cases.CONFIG, None, "cuda", kind="kernel")
        assert words in caplog.messages[-1]


def test_slow_gradients_of_tokens_in_fp8_are_told_of(gpu, kernel, caplog: pytest.LogCaptureFixture):
    """Once for a size, and only where it is slow: on the kernel, with few columns."""
    gpu("NVIDIA H200", (9, 0))
    _announce_once.cache_clear()
    for experts, hidden, kind, is_told in (
        ("fp8", 2048, "kernel", False),
        ("fp8_dgrad", 2048, "reference", False),
        ("fp8_dgrad", 4096, "kernel", False),
        ("fp8_dgrad", 2048, "kernel", True),
        ("fp8_dgrad", 2048, "kernel", False),
        ("fp8_dgrad", 3968, "kernel", True),
    ):
        config = cases.make_config(hidden=hidden, intermediate=128, experts=experts)
        caplog.clear()
        with caplog.at_level("WARNING", "flashmoe_megatron"):
            select_backend(config, None, "cuda", kind=kind, keep="all")
        told = [one for one in caplog.messages if one.startswith("experts='fp8_dgrad'")]
        assert len(told) == is_told, (experts, hidden, kind)
        assert all(f"with hidden={hidden}: below 4096 it has saved no time" in one for one in told)


def slots_announced(group: dist.ProcessGroup | None, num_ranks: int) -> list[str]:
    """What is said of two slots, without and with replicas."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logger = logging.getLogger("flashmoe_megatron")
    logger.addHandler(handler)
    _announce_once.cache_clear()
    config = cases.make_config(num_ranks=num_ranks)
    for placement in ("off", "launch", "launch"):
        select_backend(
            config, group, "cpu", kind="reference", keep="all", spare_slots=2, placement=placement
        )
    logger.removeHandler(handler)
    return records


def test_slots_on_one_rank_are_said_to_do_nothing(ranks: RankPool):
    said = "spare_slots=2 on one rank, which has all 8 experts: there are no replicas"
    assert slots_announced(None, 1) == [said]
    assert ranks.run(slots_announced, 2, num_ranks=2) == [[], []]


def test_unknown_keep():
    with pytest.raises(ConfigError, match="keep='some': wanted one of auto, all, preact"):
        select_backend(cases.CONFIG, None, "cpu", keep="some")  # type: ignore[arg-type]
