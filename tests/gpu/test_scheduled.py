"""The scheduled backend on a GPU: grouped products, kernels of its own, streams beside NCCL."""

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from flashmoe_megatron.autograd import moe_apply
from flashmoe_megatron.options import BackendOptions
from flashmoe_megatron.separate.backend import ScheduledBackend
from flashmoe_megatron.separate.kernels import KERNELS as kernels
from flashmoe_megatron.separate.steps import PLAIN as plain
from flashmoe_megatron.weights import ExpertWeights
from tests.gpu.expected import Results, assert_as_good, expected
from tests.gpu.layers import make_config
from tests.unit import cases
from tests.unit.separate import run
from tests.unit.test_scheduled import adds_in_float32

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dist.ProcessGroup]:
    """NCCL's group of one rank, whose exchanges are as asynchronous as any."""
    store = Path(tmp_path_factory.mktemp("group")) / "store"
    dist.init_process_group("nccl", store=dist.FileStore(str(store), 1), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def on(device: torch.device | str, inputs: cases.Inputs, dtype: torch.dtype) -> cases.Inputs:
    def moved(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device) if tensor.dtype == torch.bool else tensor.to(device, dtype)

    return cases.Inputs(
        *([moved(tensor) for tensor in getattr(inputs, one.name)] for one in fields(inputs))
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("degrees", [(1, 1), (4, 3)], ids=str)
def test_it_is_the_oracle_and_repeats_its_bits(
    group: dist.ProcessGroup, dtype: torch.dtype, degrees: tuple[int, int]
) -> None:
    for changes in ({}, {"activation": "gelu", "gated": False}, cases.GPT_OSS):
        config = make_config(1, **changes)
        for routing in (cases.skewed, cases.with_empty_experts, cases.to_nobody):
            given = on(DEVICE, cases.make_inputs(config, routing, [300], dtype=dtype), dtype)
            want = expected(config, given)
            for keep in ("all", "preactivations"):
                options = BackendOptions(keep=keep)
                for of_ranks in (group, None):
                    backend = ScheduledBackend(
                        config, of_ranks, device=DEVICE, options=options, degrees=degrees
                    )
                    found = run(backend, given)
                    results = {name.replace(" ", "_"): value for name, value in found.items()}
                    # Gradients of weights are rounded once more than the unfused path's.
                    assert_as_good(Results(**results), want, times=1.3)
                    for name, value in run(backend, given).items():
                        assert torch.equal(value, found[name]), name
                    torch.cuda.synchronize()
                    records = backend.take_records()
                    assert [one.direction for one in records] == ["forward", "backward"] * 2
                    assert all(one.duration_ns > 0 for one in records)


def test_it_trains_behind_an_evaluation_in_inference_mode(group: dist.ProcessGroup) -> None:
    config = make_config(1)
    dtype = torch.bfloat16
    given = on(DEVICE, cases.make_inputs(config, cases.skewed, [300], dtype=dtype), dtype)
    weights = ExpertWeights((torch.stack(given.fc1),), (torch.stack(given.fc2),))
    for of_ranks in (group, None):
        backend = ScheduledBackend(config, of_ranks, device=DEVICE)
        with torch.inference_mode():
            evaluated = moe_apply(
                backend, given.x[0], given.probs[0], given.routing_map[0], weights
            )
        assert torch.equal(run(backend, given)["out"], evaluated)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("width", [8, 1300, 7168])
def test_rows_are_copied_as_torch_copies_them(width: int, dtype: torch.dtype) -> None:
    g = torch.Generator("cuda").manual_seed(0)
    rows = torch.randn(700, width, device=DEVICE, generator=g).to(dtype)
    index = torch.randperm(3000, device=DEVICE, generator=g)[:700]
    found, want = (torch.zeros(3000, width, device=DEVICE, dtype=dtype) for _ in range(2))
    kernels.put_rows(found, index, rows)
    plain.put_rows(want, index, rows)
    assert torch.equal(found, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("sizes", [(512, 256), (2048, 1536)], ids=str)
def test_products_have_equal_bits_however_experts_are_shared(
    dtype: torch.dtype, sizes: tuple[int, int]
) -> None:
    """What the option rank_invariant needs: the bits of an expert are no matter of the others."""
    g = torch.Generator("cuda").manual_seed(0)
    counts = [0, 1, 130, 700, 64, 0, 3000, 17, 256, 129, 5, 1000, 33, 2, 400, 90]
    width, out = sizes

    def random(*size: int) -> torch.Tensor:
        return torch.randn(*size, device=DEVICE, generator=g).to(dtype)

    rows, right = random(sum(counts), width), random(sum(counts), out)
    stack = random(len(counts), width, out)

    def shared(num_ranks: int) -> list[torch.Tensor]:
        local, parts = len(counts) // num_ranks, []
        for rank in range(num_ranks):
            of_rank = counts[rank * local : (rank + 1) * local]
            first = sum(counts[: rank * local])
            these = slice(first, first + sum(of_rank))
            ends = torch.tensor(of_rank, device=DEVICE).cumsum(0).int()
            experts = slice(rank * local, (rank + 1) * local)
            products = [
                kernels.product(rows[these].clone(), stack[experts].clone(), ends, of_rank),
                kernels.grad_product(
                    right[these].clone(), stack[experts].mT.contiguous(), ends, of_rank
                ),
                kernels.product(right[these].clone(), stack[experts].clone().mT, ends, of_rank),
                kernels.weight_grad(rows[these].clone(), right[these].clone(), ends, of_rank),
            ]
            parts.append(products)
        return [torch.cat(each) for each in zip(*parts, strict=True)]

    want = shared(1)
    for num_ranks in (2, 4, 8):
        for number, (got, one) in enumerate(zip(shared(num_ranks), want, strict=True)):
            assert torch.equal(got, one), (num_ranks, number)


def test_rows_are_copied_beyond_what_32_bits_address() -> None:
    width, num_rows = 4096, 2**20 + 3  # more than 2^32 elements
    target = torch.zeros(num_rows, width, device=DEVICE, dtype=torch.bfloat16)
    rows = torch.arange(1, 5, device=DEVICE).bfloat16()[:, None].expand(4, width).contiguous()
    index = torch.tensor([num_rows - 1, 0, 2**19, 2**20], device=DEVICE)
    kernels.put_rows(target, index, rows)
    assert torch.equal(target[index], rows)
    assert int(target.any(1).sum()) == 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_weight_gradients_are_added_in_float32(dtype: torch.dtype) -> None:
    adds_in_float32(dtype, "cuda")
