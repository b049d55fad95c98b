"""What the scheduled backend has alone: parts that overlap, ways between ranks, shared experts.

``test_separate.py`` compares it with the oracle, as the reference.
"""

import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from itertools import chain
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from flashmoe_megatron import streams
from flashmoe_megatron.attempts import Attempts
from flashmoe_megatron.autograd import moe_apply
from flashmoe_megatron.call import Backend, TrafficCounters
from flashmoe_megatron.config import MoEConfig
from flashmoe_megatron.errors import (
    ConfigError,
    FlashMoEError,
    LinkError,
    RoutingError,
    RowBoundError,
    ShapeError,
)
from flashmoe_megatron.hosts.grid import HOST_VARIABLE, HostGrid
from flashmoe_megatron.options import BackendOptions
from flashmoe_megatron.ranks import Ranks
from flashmoe_megatron.select import select_backend
from flashmoe_megatron.separate.agreement import Agreement, Heard, ranks_of
from flashmoe_megatron.separate.backend import ScheduledBackend
from flashmoe_megatron.separate.exchange import make_exchange
from flashmoe_megatron.separate.plan import latest_ends
from flashmoe_megatron.separate.reference import ReferenceBackend
from flashmoe_megatron.separate.steps import PLAIN, stack_of, store
from flashmoe_megatron.separate.ways import TensorGroup, Way
from flashmoe_megatron.weights import ExpertWeights, WeightGrad
from tests.distributed import RankPool
from tests.unit import cases
from tests.unit.separate import compare, run


def part_size(count: int, part: int, degree: int) -> int:
    """How many of ``count`` rows the ``part``-th of ``degree`` parts is to have."""
    return count * (part + 1) // degree - count * part // degree


@pytest.mark.parametrize("routing", [cases.skewed, cases.with_dropped_tokens, cases.to_nobody])
def test_routes_are_cut_as_rows_are(routing: cases.Routing) -> None:
    """By part, then expert, then token; without any number that the host would have to know."""
    config = cases.make_config()
    inputs = cases.make_inputs(config, routing, [37], dtype=torch.float32)
    found = PLAIN.sort_routes(config, inputs.probs[0], inputs.routing_map[0])
    counts = found.counts.tolist()
    begins = [sum(counts[:expert]) for expert in range(len(counts))]
    for degree in (1, 2, 3, 7):
        order = []
        for part in range(degree):
            for begin, count in zip(begins, counts, strict=True):
                first = begin + sum(part_size(count, one, degree) for one in range(part))
                order += range(first, first + part_size(count, part, degree))
        cut = PLAIN.cut_routes(found.token_idx, found.place, found.ends, degree)
        assert cut.token_idx[: sum(counts)].tolist() == found.token_idx[order].tolist()
        for before, behind in zip(
            found.place.view(-1).tolist(), cut.place.view(-1).tolist(), strict=True
        ):
            assert behind >= sum(counts) if before >= sum(counts) else order[behind] == before


def test_no_part_ends_behind_its_latest_end() -> None:
    for degree in (1, 2, 3, 7):
        for counts in ([5, 0, 1, 9], [1, 1, 1], [0], [degree, 2 * degree]):
            for unused in (0, 1, degree):
                ends = latest_ends(sum(counts) + unused, degree)
                assert ends[-1] == sum(counts) + unused
                end = 0
                for part in range(degree):
                    end += sum(part_size(count, part, degree) for count in counts)
                    assert end <= ends[part]


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_phases_add_up_to_the_call(direction: str) -> None:
    config = cases.make_config()
    inputs = cases.make_inputs(config, cases.uniform, [50], dtype=torch.float32)
    backend = ScheduledBackend(config, degrees=(2, 2))
    run(backend, inputs)
    (record,) = [one for one in backend.take_records() if one.direction == direction]
    assert record.duration_ns > 0
    assert sum(record.phase_ns.values()) == record.duration_ns


def test_what_has_arrived_is_looked_at_once_it_is_waited_for() -> None:
    """An exchange that is broken by then marks it as wrong."""
    guarded: list[torch.Tensor] = []
    exchange: Any = SimpleNamespace(guard=guarded.append)
    rows = torch.ones(3, 2)
    assert Way((), rows, None, exchange).wait() is rows
    assert len(guarded) == 1
    assert guarded[0] is rows


def test_experts_that_lie_in_other_ways_are_not_read_as_the_first_one_does() -> None:
    memory = torch.arange(3.0 * 16).view(3, 4, 4)
    even = [memory[0], memory[1], memory[2]]
    assert stack_of(even).data_ptr() == memory.data_ptr(), "nothing is copied"
    turned = [memory[0], memory[1].t(), memory[2]]
    assert torch.equal(stack_of(turned), torch.stack(turned))


def test_a_gradient_in_a_part_of_a_memory_stays_there() -> None:
    """Whoever reads the whole memory has to find it."""
    memory = torch.zeros(3 * 8)
    part = torch.empty(0).set_(memory.untyped_storage(), 8, (2, 2, 2))  # which has no base
    store([WeightGrad(part, False)], torch.ones(2, 2, 2))
    assert memory.tolist() == [0.0] * 8 + [1.0] * 8 + [0.0] * 8
    whole = torch.zeros(2, 2, 2)
    store([WeightGrad(whole, False)], values := torch.ones(2, 2, 2))
    assert whole.data_ptr() == values.data_ptr(), "a memory of its own is taken over"


def adds_in_float32(dtype: torch.dtype, device: str) -> None:
    """Gradients are added to main_grad as the products' sums are, not rounded to 16 bits before."""
    config = cases.make_config()
    inputs = cases.make_inputs(config, cases.with_empty_experts, [64], dtype=dtype)
    x, probs = inputs.x[0].to(device), inputs.probs[0].to(device).requires_grad_()
    routing_map, grad_out = inputs.routing_map[0].to(device), inputs.grad_out[0].to(device)
    sums: dict[bool, list[torch.Tensor]] = {}
    for is_stacked in (True, False):
        found = []
        kinds = []
        for experts in (inputs.fc1, inputs.fc2):
            kind = [torch.stack(experts)] if is_stacked else [one.clone() for one in experts]
            kinds.append([one.to(device).requires_grad_() for one in kind])
            for weight in kinds[-1]:
                weight.main_grad = torch.ones(weight.shape, device=device)  # type: ignore[attr-defined]
        weights = ExpertWeights(tuple(kinds[0]), tuple(kinds[1]))
        backend = ScheduledBackend(config, device=torch.device(device), degrees=(2, 2))
        out = moe_apply(backend, x, probs, routing_map, weights, accumulate_into_main_grad=True)
        out.backward(grad_out)
        for kind in kinds:
            every = [one.main_grad.view(-1, *one.shape[-2:]) for one in kind]  # type: ignore[attr-defined]
            found.append(torch.cat(every))
        sums[is_stacked] = found
    for stacked, one_by_one in zip(sums[True], sums[False], strict=True):
        assert torch.equal(stacked, one_by_one)
        added = stacked - 1
        assert not added[::2].any(), "these experts have no rows"
        rounded = added.to(dtype).float()
        exact = (rounded - added).abs() < 2e-7  # what adding to 1 in float32 leaves
        assert exact[1::2].float().mean() < 0.2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_weight_gradients_are_added_in_float32(dtype: torch.dtype) -> None:
    adds_in_float32(dtype, "cpu")


def run_ranks(group: dist.ProcessGroup, config: MoEConfig, inputs: cases.Inputs) -> dict[str, Any]:
    """Everything that several ranks are to show, in one job."""
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    options = BackendOptions(keep="preactivations")
    reference = ReferenceBackend(config, group, options=options)
    want = run(reference, inputs, rank=rank)
    bits = {}
    for degrees in ((1, 1), (2, 3), (3, 2)):
        for keep in ("all", "preactivations"):
            options = BackendOptions(keep=keep)
            backend = ScheduledBackend(config, group, options=options, degrees=degrees)
            found = run(backend, inputs, rank=rank, as_indices=keep == "all")
            compare(found, want, inputs.x[0].dtype)
            bits[degrees] = found
    (record,) = [one for one in backend.take_records() if one.direction == "forward"]
    assert record.num_rows == sum(record.expert_rows)
    own = inputs.routing_map[rank].sum(0).view(num_ranks, -1).sum(1).tolist()
    assert record.routes == (own[rank], sum(own)), "those that stay on the rank, and all"
    assert backend.traffic.rows_sent == reference.traffic.rows_sent
    if num_ranks == 4:
        grid = HostGrid(2, 2, rank)
        for exchange in ("2dh", "auto"):
            options = BackendOptions(keep="all", exchange=exchange)
            for degrees, direct in bits.items():
                backend = ScheduledBackend(
                    config, group, options=options, grid=grid, degrees=degrees
                )
                found = run(backend, inputs, rank=rank)
                for name, value in direct.items():
                    assert torch.equal(found[name], value), f"{exchange} {degrees}: {name}"
            with pytest.raises(RoutingError, match="rank 2: token 0 selects 8 experts"):
                broken(backend, inputs, rank)
        found = run(backend, inputs, rank=rank)  # the next call works
    backend = ScheduledBackend(config, group, degrees=(2, 2))
    with pytest.raises(RoutingError, match=f"rank {num_ranks // 2}: token 0 selects 8 experts"):
        broken(backend, inputs, rank)
    compare(run(backend, inputs, rank=rank), want, inputs.x[0].dtype)
    tight = BackendOptions(row_bound=1.0)
    with pytest.raises(RowBoundError, match="was to receive"):
        run(ScheduledBackend(config, group, options=tight), crowded(config, inputs), rank=rank)
    return want


def broken(backend: Backend, inputs: cases.Inputs, rank: int) -> None:
    """One rank's token selects too many experts."""
    routing_map = inputs.routing_map[rank].clone()
    if rank == backend.config.num_ranks // 2:
        routing_map[0] = True
    run(backend, replace(inputs, routing_map=[routing_map] * backend.config.num_ranks), rank=rank)


def crowded(config: MoEConfig, inputs: cases.Inputs) -> cases.Inputs:
    """All tokens of all ranks select the last two experts, 600 times as many as there are."""
    maps, probs, xs, grads = [], [], [], []
    for _ in inputs.x:
        routing_map = torch.zeros(600, config.num_experts, dtype=torch.bool)
        routing_map[:, -2:] = True
        maps.append(routing_map)
        probs.append(routing_map.float())
        xs.append(torch.zeros(600, config.hidden, dtype=inputs.x[0].dtype))
        grads.append(xs[-1])
    return replace(inputs, x=xs, probs=probs, routing_map=maps, grad_out=grads)


def test_ranks_are_the_reference_and_hosts_change_no_bit() -> None:
    pool = RankPool(4)
    try:
        for num_ranks, tokens in ((2, [37, 20]), (4, [9, 0, 33, 16])):
            for routing in (cases.skewed, cases.to_one_rank):
                config = cases.make_config(num_ranks=num_ranks, max_tokens=600)
                inputs = cases.make_inputs(config, routing, tokens, dtype=torch.float32)
                inputs.x[num_ranks // 2] = inputs.x[num_ranks // 2].clone()
                pool.run(run_ranks, config, inputs, num_ranks=num_ranks)
    finally:
        pool.close()


def cut(inputs: cases.Inputs, part: int) -> cases.Inputs:
    """One of two slices of the intermediate dimension of every expert."""
    fc1 = [w.view(2, 2, -1, w.shape[1])[:, part].flatten(0, 1) for w in inputs.fc1]  # gate, up
    fc2 = [w.view(len(w), 2, -1)[:, part].contiguous() for w in inputs.fc2]
    return replace(inputs, fc1=fc1, fc2=fc2)


def share_experts(group: dist.ProcessGroup, inputs: cases.Inputs) -> None:
    """Two expert-parallel groups, [0, 2] and [1, 3], whose ranks share experts pairwise."""
    rank = dist.get_rank(group)
    made = [dist.new_group(members) for members in ([0, 2], [1, 3], [0, 1], [2, 3])]
    try:
        place, part = rank // 2, rank % 2
        mine, tensor_group = made[part], made[2 + place]
        config = cases.make_config(num_ranks=2, max_tokens=700)
        full = cases.make_config(intermediate=2 * config.intermediate)
        want = []
        for other in range(4):
            its = {name: [getattr(inputs, name)[other]] for name in PER_RANK}
            want.append(run(ReferenceBackend(full), replace(inputs, **its)))
        grads = [sum(one[f"grad {name}"] for one in want) for name in ("fc1", "fc2")]
        slices = cut(replace(inputs, fc1=list(grads[0]), fc2=list(grads[1])), part)
        local = slice(place * config.num_local_experts, (place + 1) * config.num_local_experts)
        want[rank]["grad fc1"] = torch.stack(slices.fc1[local])
        want[rank]["grad fc2"] = torch.stack(slices.fc2[local])
        ranks_of_mine = {name: getattr(inputs, name)[part::2] for name in PER_RANK}
        given = replace(cut(inputs, part), **ranks_of_mine)
        dtype = inputs.x[0].dtype

        def make(degrees: tuple[int, int] = (2, 2), **options: Any) -> ScheduledBackend:
            return ScheduledBackend(
                config,
                mine,
                options=BackendOptions(**options),
                degrees=degrees,
                tensor_group=tensor_group,
            )

        for degrees in ((1, 1), (3, 2)):
            for keep in ("all", "preactivations"):
                backend = make(degrees, keep=keep)
                found = run(backend, given, rank=place, as_indices=keep == "all")
                compare(found, want[rank], dtype)
        again = run(backend, given, rank=place)
        assert all(torch.equal(again[name], found[name]) for name in ("out", "grad fc1"))
        assert backend.traffic.pad_rows_sent == 0

        routing_map = given.routing_map[place].clone()
        routing_map[:1] = routing_map[:1] | (rank == 3)
        bad = replace(given, routing_map=[routing_map] * 2)
        with pytest.raises(RoutingError, match="rank 1: token 0 selects 8 experts"):
            run(backend, bad, rank=place)
        narrow = replace(given, x=[x.float() if rank == 0 else x for x in given.x])
        with pytest.raises(ShapeError, match="rank 0: x is torch.float32"):
            run(backend, narrow, rank=place)
        with pytest.raises(RowBoundError, match="was to receive"):
            run(make(row_bound=1.0), crowded(config, given), rank=place)
        biases = (torch.zeros(4, config.hidden, dtype=dtype),)
        weights = ExpertWeights(
            (torch.stack(given.fc1[local]),), (torch.stack(given.fc2[local]),), fc2_bias=biases
        )
        arguments = given.x[place], given.probs[place], given.routing_map[place]
        with pytest.raises(ConfigError, match=f"rank {place}: experts of several ranks"):
            moe_apply(backend, *arguments, weights)
        for kind in ("reference", "auto"):
            with pytest.raises(ConfigError, match="of 2 ranks on the backend 'reference'"):
                select_backend(config, mine, "cpu", kind=kind, tensor_group=tensor_group)
        compare(run(backend, given, rank=place), want[rank], dtype)
    finally:
        for one in made:
            if one is not dist.GroupMember.NON_GROUP_MEMBER:
                dist.destroy_process_group(one)


def test_rows_of_all_ranks_that_share_experts_count_in_the_bound() -> None:
    """Where every rank hears its whole group's counts, too: these are not all that come."""
    config = cases.make_config(num_ranks=2, num_experts=4, topk=1)
    # What comes is from two ranks of this group and two of the other one.
    told = {"own": [64] * 4, "received": [64] * 8, "all counts of this group": [64] * 8}

    exchange: Any = SimpleNamespace(needs_all_counts=True)
    found: Any = SimpleNamespace(counts=torch.tensor(told["own"]), routes=lambda *_: "routes")
    heard = Heard(torch.tensor(told["received"]).view(4, 2), lambda: [*chain(*told.values())])
    for most_blocks in (4, 3):
        tensor: Any = SimpleNamespace(rank=0)
        agreement = Agreement(config, Ranks(None), tensor, exchange, most_blocks=most_blocks)
        plan = partial(agreement.plan, heard, found, torch.empty(0), torch.empty(0), Attempts())
        if most_blocks == 4:
            assert plan()[0] == "routes"
        else:
            with pytest.raises(RowBoundError, match="was to receive 4 blocks of 128 rows"):
                plan()


def test_a_gradient_that_is_a_view_is_written_where_it_is() -> None:
    """A gradient that owns its memory may take the values' own, for which nothing is copied."""
    base, values = torch.zeros(2, 3, 4), torch.randn(2, 3, 4)
    store([WeightGrad(base.view(2, 3, 4), False)], values)
    assert torch.equal(base, values)
    assert base.data_ptr() != values.data_ptr()
    store([WeightGrad(base, False)], values)
    assert base.data_ptr() == values.data_ptr()


def sum_of_shares(group: dist.ProcessGroup) -> tuple[list[float], int]:
    """Four ranks' summands of one row of each, in bfloat16, and what one has sent."""
    traffic = TrafficCounters()
    tensor = TensorGroup(group, traffic, torch.device("cpu"))
    value = 1.0 if tensor.rank == 0 else 2.0**-8  # half of what bfloat16 has behind 1
    rows = torch.full((4, 64), value, dtype=torch.bfloat16)
    out = torch.empty(1, 64, dtype=torch.bfloat16)
    tensor.reduce(out, rows, [1] * 4, None)
    assert traffic.rows_sent == 3
    return out[0].unique().tolist(), traffic.bytes_sent


def test_what_ranks_share_is_rounded_once(ranks: RankPool) -> None:
    want = torch.tensor(1 + 3 * 2.0**-8).bfloat16().item()
    assert want > 1
    assert ranks.run(sum_of_shares) == [([want], 3 * 64 * 2)] * 4


def refuse_gradients_alone(group: dist.ProcessGroup, inputs: cases.Inputs) -> str:
    """Two ranks with slices of all experts, of which one has a gradient of another shape."""
    mine, rank = cut(inputs, dist.get_rank(group)), dist.get_rank(group)
    config = cases.make_config(num_ranks=1, max_tokens=64)
    backend = ScheduledBackend(config, tensor_group=group)
    weights = ExpertWeights((torch.stack(mine.fc1),), (torch.stack(mine.fc2),))
    call = mine.x[0], mine.probs[0], mine.routing_map[0]
    _, saved = backend.forward(*call, weights, training=True)
    fc1, fc2 = (
        [WeightGrad(torch.empty_like(kind[0]), False)] for kind in (weights.fc1, weights.fc2)
    )
    if rank == 0:
        fc1 = [WeightGrad(torch.empty(3, 3, dtype=torch.float64), False)]
    for grad in backend.backward(mine.grad_out[0], saved, weights, fc1, fc2):
        assert bool(grad.isnan().all()) == (rank == 0)
    with pytest.raises(ShapeError) as raised:
        backend.forward(*call, weights, training=True)
    backend.forward(*call, weights, training=True)
    return str(raised.value)


def test_gradients_that_one_of_those_who_share_experts_refuses(ranks: RankPool) -> None:
    config = cases.make_config(num_ranks=1, intermediate=128, max_tokens=64)
    inputs = cases.make_inputs(config, cases.skewed, [30], dtype=torch.float64)
    for said in ranks.run(refuse_gradients_alone, inputs, num_ranks=2):
        assert "a weight gradient has shape (3, 3)" in said


PER_RANK = ("x", "probs", "routing_map", "grad_out")


def test_ranks_that_share_experts_are_the_reference_with_whole_ones(ranks: RankPool) -> None:
    config = cases.make_config(intermediate=128)
    for routing in (cases.skewed, cases.with_empty_experts):
        inputs = cases.make_inputs(config, routing, [9, 30, 0, 17], dtype=torch.float64)
        ranks.run(share_experts, inputs, num_ranks=4)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"exchange": "2dh"}, "exchange='2dh' in an expert-parallel group of 1 x 1"),
        ({"exchange": "tree"}, "exchange='tree': wanted one of auto, direct, copies, 2dh"),
        ({"degree": "0"}, "degree='0': wanted auto, N or N,M, of numbers from 1 to 64"),
        ({"degree": "2,3,4"}, "degree='2,3,4': wanted auto"),
        ({"degree": 2}, "degree=2: wanted auto"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        select_backend(cases.CONFIG, None, "cpu", kind="scheduled", **options)


def without_blocks_of_hosts(group: dist.ProcessGroup, exchange: str) -> str:
    with pytest.MonkeyPatch.context() as patches:
        patches.setenv(HOST_VARIABLE, f"host{dist.get_rank(group) % 2}")
        config = cases.make_config(num_ranks=4)
        with pytest.raises(ConfigError) as caught:
            select_backend(config, group, "cpu", kind="scheduled", exchange=exchange)
    return str(caught.value)


def test_a_group_without_a_layout_of_hosts_is_refused_on_every_rank(ranks: RankPool) -> None:
    for exchange in ("auto", "2dh"):
        for said in ranks.run(without_blocks_of_hosts, exchange):
            assert "ranks of a host are not neighbours" in said


def test_it_is_chosen_by_name() -> None:
    backend = select_backend(cases.CONFIG, None, "cpu", kind="scheduled", degree="2,3")
    assert isinstance(backend, ScheduledBackend)
    assert backend.degrees == (2, 3)
    alone = select_backend(cases.CONFIG, None, "cpu", kind="scheduled")
    assert isinstance(alone, ScheduledBackend)
    assert alone.degrees == (1, 1), "a rank that is alone has nothing to overlap"


def test_kernels_are_the_steps_in_torch() -> None:
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "tests.unit.interpreted_kernels"]
    done = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_copies_are_for_whole_experts_on_gpus_of_one_host() -> None:
    options = BackendOptions(exchange="copies")
    gpu = torch.device("cuda")
    for grid, device, is_cut, words in (
        (HostGrid(1, 2, 0), torch.device("cpu"), False, "on cpu: wanted GPUs of one host"),
        (HostGrid(2, 2, 0), gpu, False, "of 2 x 2 .* on cuda: wanted GPUs of one host"),
        (HostGrid(1, 2, 0), gpu, True, "where several ranks share each expert"),
    ):
        with pytest.raises(ConfigError, match=words):
            make_exchange(options, Ranks(None), grid, TrafficCounters(), device, is_cut=is_cut)


def call_alone(group: dist.ProcessGroup) -> str:
    """A rank whose exchange has failed, of which the others know, calls without them."""
    config = cases.make_config(num_ranks=2)
    inputs = cases.make_inputs(config, cases.uniform, [8, 8], dtype=torch.float32)
    backend = ScheduledBackend(config, group)
    said = ""
    if dist.get_rank(group) == 0:
        with pytest.MonkeyPatch.context() as patches:
            for name in ("restart", "raise_if_broken"):
                patches.setattr(backend._exchange, name, _raise_broken)
            try:
                run(backend, inputs)
            except LinkError as error:
                said = str(error)
    dist.barrier(group)
    compare(
        run(backend, inputs, rank=dist.get_rank(group)),
        run(ReferenceBackend(config, group), inputs, rank=dist.get_rank(group)),
        torch.float32,
    )
    return said


def _raise_broken(*_: object) -> None:
    raise LinkError("it broke")


def breaks_while_others_wait(group: dist.ProcessGroup) -> list[str]:
    """The exchange breaks when all ranks know that one refuses, and none has heard what."""
    config = cases.make_config(num_ranks=2)
    inputs = cases.make_inputs(config, cases.uniform, [8, 8], dtype=torch.float32)
    rank, said = dist.get_rank(group), []
    narrow = replace(inputs, x=[inputs.x[0].double(), inputs.x[1]])
    backend = ScheduledBackend(config, group)
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(backend._exchange.ranks, "gather", _raise_broken)
        for call in (
            lambda: broken(backend, inputs, rank),
            lambda: run(backend, narrow, rank=rank),
        ):
            with pytest.raises(FlashMoEError) as raised:
                call()
            said.append(str(raised.value))
    return said


def test_what_breaks_while_a_refusal_is_heard_ends_the_call(ranks: RankPool) -> None:
    refusing, other = ranks.run(breaks_while_others_wait, num_ranks=2)
    assert other == ["it broke"] * 2
    assert refusing[0] == "it broke"
    assert "x is torch.float64" in refusing[1], "a rank's own error comes first"


def test_the_host_waits_for_counts_as_long_as_the_exchange_is_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exchange = mock.Mock(wait_on_host=mock.Mock(side_effect=LinkError("it broke")))
    ranks = ranks_of(cases.CONFIG, None)
    agreement = Agreement(cases.CONFIG, ranks, None, exchange, most_blocks=None)
    agreement._here, arrived = mock.Mock(), mock.Mock()
    monkeypatch.setattr(streams, "mark", lambda device: arrived)
    wait = agreement.host_counts(mock.Mock(device=torch.device("cuda")))
    with pytest.raises(LinkError, match="it broke"):
        wait()
    exchange.wait_on_host.assert_called_once_with(arrived)
    arrived.synchronize.assert_not_called()


def exceed_the_bound(group: dist.ProcessGroup) -> list[str]:
    config = cases.make_config(num_ranks=4, max_tokens=600)
    inputs = cases.make_inputs(config, cases.uniform, [8] * 4, dtype=torch.float32)
    rank, said, asked = dist.get_rank(group), [], []
    for exchange in ("direct", "2dh"):
        options = BackendOptions(row_bound=1.0, exchange=exchange)
        backend = ScheduledBackend(config, group, options=options, grid=HostGrid(2, 2, rank))
        agreement = backend._agreement
        with mock.patch.object(agreement, "_swap", wraps=agreement._swap) as swap:
            run(backend, inputs, rank=rank)
            with pytest.raises(RowBoundError) as raised:
                run(backend, crowded(config, inputs), rank=rank)
        asked.append(swap.call_count)
        said.append(str(raised.value))
    assert asked == [4, 0], "counts and the bound of two calls, or nothing but all counts"
    return said


def test_who_knows_all_counts_asks_nobody_about_the_bound(ranks: RankPool) -> None:
    said = {one for of_rank in ranks.run(exceed_the_bound) for one in of_rank}
    assert len(said) == 1
    assert said.pop().startswith("rank 3 was to receive 38 blocks of 128 rows")


def test_a_broken_exchange_is_told_to_no_rank(ranks: RankPool) -> None:
    assert ranks.run(call_alone, num_ranks=2) == ["it broke", ""]
