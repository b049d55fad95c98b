"""An iteration whose rows exceed the bound is repeated, as if nothing had been."""

import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from flashmoe_megatron.adapters.megatron import schedule
from flashmoe_megatron.adapters.megatron.repeat import batches, iteration, state, verdicts
from flashmoe_megatron.errors import RowBoundError
from flashmoe_megatron.options import RowBound
from flashmoe_megatron.separate.reference import ReferenceBackend
from tests.distributed import RankError, RankPool, refusal
from tests.megatron import repeats
from tests.megatron.harness import Layout
from tests.megatron.repeats import Case, Trained, differences, train

OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
EP2 = Layout(expert=2)
RECOMPUTED = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


def assert_as_if_nothing_had_been(case: Case, pool: RankPool) -> list[Trained]:
    """Compares every tensor with those of a training whose bound never overflows."""
    repeated, never = pool.run(train, case), pool.run(train, replace(case, row_bound=9.0))
    for got, want in zip(repeated, never, strict=True):
        assert differences(got, want) == []
        assert (got.repeats > 0, want.repeats) == (True, 0)
        assert got.read == want.read
    return repeated


ON_TWO_RANKS = {
    "reference": Case(EP2, parallel={"check_for_nan_in_grad": True}, evaluated=(2,)),
    "scheduled": Case(
        EP2,
        settings={"backend": "scheduled", "degree": "2"},
        config={"mtp_num_layers": 1},
        parallel=OVERLAP,
        evaluated=(2,),
    ),
    "forty": Case(EP2, parallel=OVERLAP, micro_batches=1, steps=40, crowded=(6, 19, 33)),
    "measured": Case(EP2, row_bound="auto", room=0.8, crowded=(2,), evaluated=(0, 3)),
    "inputs": Case(
        EP2,
        settings={"keep": "inputs"},
        config={
            **RECOMPUTED,
            "moe_router_load_balancing_type": "global_aux_loss",
            "moe_router_score_function": "softmax",
            "moe_router_enable_expert_bias": False,
        },
        parallel=OVERLAP,
    ),
    "overlapped": Case(
        EP2,
        config={"overlap_moe_expert_parallel_comm": True, "bf16": True, "hidden_dropout": 0.0},
        later={"bf16": False},
        parallel=OVERLAP,
        micro_batches=4,
        steps=3,
    ),
}
ON_FOUR_RANKS = {
    "ep2_dp2": Case(EP2, parallel=OVERLAP, evaluated=(0,)),
    "pp2_vpp2_ep2": Case(
        Layout(expert=2, pipeline=2, virtual=2), micro_batches=4, steps=3, evaluated=(1,)
    ),
    "pp2_ep2": Case(Layout(expert=2, pipeline=2), steps=3, parallel=OVERLAP),
}


@pytest.mark.parametrize("name", ON_TWO_RANKS)
def test_every_tensor_is_that_of_a_larger_bound(name: str, two_ranks: RankPool) -> None:
    assert_as_if_nothing_had_been(ON_TWO_RANKS[name], two_ranks)


@pytest.mark.parametrize("name", ON_FOUR_RANKS)
def test_ranks_that_know_of_no_overflow_repeat_too(name: str, four_ranks: RankPool) -> None:
    assert_as_if_nothing_had_been(ON_FOUR_RANKS[name], four_ranks)


def test_a_checkpoint_behind_a_repeat_is_that_of_a_larger_bound(
    two_ranks: RankPool, tmp_path: Path
) -> None:
    """Every tensor of the file, for parameters and for the optimizer, and whatever follows it."""
    files, resumed = {}, {}
    for bound in (1.0, 9.0):
        folder = tmp_path / f"bound_{bound:g}"
        case = Case(
            EP2, row_bound=bound, steps=2, crowded=(1,), evaluated=(1,), save_to=str(folder)
        )
        trained = two_ranks.run(train, case)
        assert [each.repeats > 0 for each in trained] == [bound == 1.0] * 2
        file = folder.with_suffix(".pt")
        dcp_to_torch_save(folder, file)
        files[bound] = dict(_tensors("", torch.load(file, weights_only=False)))
        case = Case(EP2, row_bound=bound, steps=2, crowded=(0,), load_from=str(folder))
        resumed[bound] = two_ranks.run(train, case)
    assert len(files[1.0]) > 20
    assert files[1.0].keys() == files[9.0].keys()
    for name, tensor in files[1.0].items():
        assert torch.equal(tensor, files[9.0][name]), name
    for got, want in zip(resumed[1.0], resumed[9.0], strict=True):
        assert differences(got, want) == []
        assert (got.repeats > 0, want.repeats) == (True, 0)


def _tensors(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, dict | list | tuple):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _tensors(f"{name}.{key}", each)


def test_buffers_have_room_behind_a_repeat(two_ranks: RankPool) -> None:
    """The second crowded iteration fits into what the first one needed, and a tenth."""
    case = Case(EP2, room=1.1, steps=5, crowded=(1, 2, 3, 4), evaluated=(4,))
    assert [each.repeats for each in two_ranks.run(train, case)] == [1, 1]


def ends(group: dist.ProcessGroup, case: Case) -> tuple[str, str]:
    """The error of a training, and what its user has been told of it before."""
    from flashmoe_megatron.adapters.megatron.routed import _said

    _said.clear()
    said = refusal(group, train, case)
    return said, " ".join(line for line in _said if "and is not repeated" in line)


GRAPHED = {"cuda_graph_impl": "full_iteration"}


@pytest.mark.parametrize(
    ("sizes", "given", "bound"),
    [
        ({"expert_model_parallel_size": 1}, 1.0, None),
        ({}, 1.0, None),
        ({"expert_model_parallel_size": 2}, 1.0, 1.0),
        ({"expert_model_parallel_size": 1, "tensor_model_parallel_size": 2}, 1.0, 1.0),
        ({"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1}, 1.0, None),
        ({"expert_model_parallel_size": 1}, "auto", None),
        ({"expert_model_parallel_size": 2}, "auto", "auto"),
        ({"expert_model_parallel_size": 2}, None, None),
        ({"expert_model_parallel_size": 2, **GRAPHED}, None, "auto"),
        ({"expert_model_parallel_size": 2, **GRAPHED}, 1.5, 1.5),
        ({"expert_model_parallel_size": 1, **GRAPHED}, None, None),
        ({"expert_model_parallel_size": 2, "moe_expert_rank_capacity_factor": 2}, None, 2.0),
    ],
    ids=str,
)
def test_only_iterations_whose_rows_may_not_fit_are_watched(
    sizes: dict[str, Any], given: RowBound | None, bound: RowBound | None
) -> None:
    """A rank that has all experts receives the rows of its own tokens, which any bound holds."""
    config = SimpleNamespace(num_moe_experts=4, moe_token_dispatcher_type="flashmoe", **sizes)
    chunk = SimpleNamespace(config=config)
    with mock.patch.object(iteration, "current_value", return_value=given):
        assert iteration._bound_of(chunk) == bound


def test_a_rank_with_all_experts_has_the_bits_of_exact_buffers(two_ranks: RankPool) -> None:
    """All tokens of an iteration choose the same experts, and buffers hold just their rows."""
    case = Case(Layout(), parallel=OVERLAP, evaluated=(1,))
    bounded, exact = two_ranks.run(train, case), two_ranks.run(train, replace(case, row_bound=None))
    for got, want in zip(bounded, exact, strict=True):
        assert differences(got, want) == []
        assert got.repeats == 0


def test_repeats_in_a_row_have_a_limit(two_ranks: RankPool) -> None:
    case = Case(EP2, steps=8, crowded=tuple(range(8)), most_in_a_row=2)
    for said, told in two_ranks.run(ends, case):
        assert said.startswith("RowBoundError: rank ")
        assert said.endswith("(the 2 iterations before have been repeated already)")
        assert not told


@pytest.mark.parametrize("wrong", ["batches", "gradients"])
def test_a_bound_is_not_measured_where_nothing_can_be_repeated(
    wrong: str, two_ranks: RankPool
) -> None:
    for said, told in two_ranks.run(ends, Case(EP2, row_bound="auto", wrong=wrong)):
        assert said.startswith("ConfigError: --flashmoe-row-bound auto: an iteration cannot be")
        assert said.endswith(
            "wanted a number, or neither a bound nor a CUDA graph of the iteration"
        )
        assert not told


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("batches", "data_iterator is a Queue, wanted an iterator, a list of iterators or None"),
        ("gradients", "gradients of earlier calls would be lost: wanted one call of the schedule"),
    ],
    ids=["batches", "gradients"],
)
def test_a_loop_that_cannot_be_repeated_ends_as_it_did(
    wrong: str, words: str, two_ranks: RankPool
) -> None:
    """The user learns of it in the first iteration."""
    for said, told in two_ranks.run(ends, Case(EP2, crowded=(0, 1, 2), wrong=wrong)):
        assert said.startswith("RowBoundError: rank ")
        assert said.endswith("or leave it out for exact buffers")
        assert "an iteration with more rows than the row bound allows ends this run" in told
        assert words in told


def test_a_mistake_of_one_iteration_ends_the_run(two_ranks: RankPool) -> None:
    """A loop that was all right in its first iteration."""
    for said, _ in two_ranks.run(ends, Case(EP2, crowded=(1, 2, 3), wrong="later")):
        assert said.startswith("RowBoundError: rank ")
        assert "(gradients of earlier calls would be lost: wanted" in said


def test_a_mistake_behind_a_measured_iteration_ends_the_run(two_ranks: RankPool) -> None:
    """Iterations that measure leave gradients, too."""
    case = Case(EP2, row_bound="auto", measured=1, room=0.5, crowded=(1, 2, 3), wrong="later")
    for said, _ in two_ranks.run(ends, case):
        assert "(gradients of earlier calls would be lost: wanted" in said


def test_nan_without_an_overflow_ends_the_run(two_ranks: RankPool) -> None:
    """It is raised after the iteration, and nothing is repeated."""
    told = two_ranks.run(ends, Case(EP2, row_bound=9.0, wrong="weights"))
    for rank, (said, _) in enumerate(told):
        assert said.startswith(f"RoutingError: rank {rank}: the probability of token 0")


def test_batches_come_again_as_they_were_read() -> None:
    """The iteration may take its batches apart, and read fewer in one turn than in the next."""
    given = iter([{"tokens": torch.arange(3)}, {"tokens": torch.arange(4)}, {"more": 1}])
    kept = batches.keep_batches([given, None])
    assert kept[1] is None
    for batch in (next(kept[0]), next(kept[0])):
        batch.pop("tokens").zero_()
    again = batches.kept_again(kept)
    assert again[1] is None
    assert [next(again[0])["tokens"].tolist() for _ in range(2)] == [[0, 1, 2], [0, 1, 2, 3]]
    assert next(again[0]) == {"more": 1}
    assert batches.is_kept([given, None])
    assert not batches.is_kept([given, [1]])
    own = batches.keep_batches(iter([batches, 1]))  # modules cannot be copied
    assert (next(own), next(own)) == (batches, 1)
    assert "a batch, a module, cannot be copied: cannot pickle" in (batches.problem_of(own) or "")
    assert batches.problem_of(kept) is None
    wrapped = SimpleNamespace(__next__=None, num_left=2)
    assert batches.KeptBatches(wrapped).num_left == 2  # type: ignore[arg-type]


def test_quantizers_of_a_users_own_are_not_put_back() -> None:
    """Scales of Transformer Engine's own recipes are put back, or come from a call's values."""
    model = torch.nn.Linear(1, 1)
    refused = {"custom": "--fp8-recipe custom has quantizers that may keep", "delayed": None}
    for recipe, wanted in {**refused, "blockwise": None}.items():
        model.config = SimpleNamespace(fp8="e4m3", fp8_recipe=recipe)  # type: ignore[assignment]
        found = iteration._Model([model]).problem({"data_iterator": None, "forward_only": True})
        assert (found or "").startswith(wanted or "")
        assert (found is None) == (wanted is None)


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.current_max_attn_logits: torch.Tensor | None = None
        self.register_buffer("tokens", torch.zeros(2))
        self.register_buffer("none", None)


@dataclass
class Entry:
    """As a release keeps a loss."""

    values: torch.Tensor
    group: str | None = None


def test_all_that_an_iteration_changes_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(3)
    states = {"graphed": generator, "plain": torch.arange(3)}
    tracker = SimpleNamespace(
        get_states=lambda: dict(states), set_states=lambda new: states.update(new)
    )
    losses = {"aux": Entry(torch.ones(2)), "table": {"values": torch.ones(2), "group": None}}
    values = losses["aux"].values
    replay = SimpleNamespace(target=torch.arange(2), backward=[1, 2])
    helper = type("MTPLossLoggingHelper", (), {"tracker": {}})
    for name, content in (
        ("tensor_parallel.random", {"get_cuda_rng_tracker": lambda: tracker}),
        (
            "transformer.moe.router_replay",
            {"RouterReplay": SimpleNamespace(global_router_replay_instances=[replay])},
        ),
        (
            "transformer.moe.moe_logging",
            {"get_moe_metrics_tracker": lambda: SimpleNamespace(metrics=losses)},
        ),
        ("transformer.moe.moe_utils", {}),
        ("transformer.multi_token_prediction", {"MTPLossLoggingHelper": helper}),
    ):
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, f"megatron.core.{name}", module)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: torch.zeros(1))
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda _: None)
    model = Attention()
    drawing = torch.nn.Module()  # without buffers
    drawing.own = torch.Generator().manual_seed(7)
    scales = SimpleNamespace(scale=torch.full((2,), 8.0), amax_history=torch.ones(3, 2))
    drawing.fp8_meta = {"scaling_fwd": scales}
    saved = state.Changing([model, drawing]).save()
    drawn = torch.rand(3, generator=drawing.own)
    scales.scale.fill_(1.0)
    scales.amax_history.fill_(torch.nan)
    random = torch.rand(3), torch.rand(3, generator=generator)
    model.tokens += 1
    model.current_max_attn_logits = torch.ones(4)
    losses["aux"].values += torch.nan
    losses["aux"].group = "a group"
    losses["table"]["values"] = torch.zeros(2)
    losses["new"] = Entry(torch.ones(2))
    helper.tracker["values"] = torch.ones(1)
    states["plain"] = torch.zeros(3)
    replay.target, replay.recorded = torch.zeros(2), torch.ones(1)
    replay.backward.pop()
    saved.restore()
    assert model.tokens.tolist() == [0, 0]
    assert model.current_max_attn_logits is None
    assert losses.keys() == {"aux", "table"}
    assert losses["aux"].values is values, "a CUDA graph adds to it there"
    assert values.tolist() == losses["table"]["values"].tolist() == [1, 1]
    assert losses["aux"].group is None
    assert helper.tracker == {}
    assert states["plain"].tolist() == [0, 1, 2]
    assert replay.target.tolist() == [0, 1]
    assert (replay.backward, hasattr(replay, "recorded")) == ([1, 2], False)
    assert torch.equal(torch.rand(3, generator=drawing.own), drawn)
    assert scales.scale.tolist() == [8, 8]
    assert scales.amax_history.tolist() == [[1, 1]] * 3
    again = torch.rand(3), torch.rand(3, generator=generator)
    assert all(map(torch.equal, random, again))


def test_verdicts_wait_and_see_what_they_were_given() -> None:
    class RerunStateMachine:
        seen: ClassVar[list[tuple[float, str]]] = []

        def validate_result(self, result: torch.Tensor, message: str) -> None:
            self.seen.append((float(result), message))

    module = ModuleType("rerun_state_machine")
    module.RerunStateMachine = RerunStateMachine  # type: ignore[attr-defined]
    verdicts.patch_state_machine(module)
    machine, loss = RerunStateMachine(), torch.tensor(3.0)
    with verdicts.hold_verdicts() as held:
        machine.validate_result(loss, message="a loss")
        loss /= 2
    assert machine.seen == []
    for give in held:
        give()
    machine.validate_result(loss, "at once")
    assert machine.seen == [(3.0, "a loss"), (1.5, "at once")]


def graphed_iteration(group: dist.ProcessGroup) -> list[str]:
    """What a wrapper of the whole iteration does whose second replay overflows."""
    done: list[str] = []
    graph = SimpleNamespace(reset=lambda: done.append("reset"))

    class FullCudaGraphWrapper:
        curr_iteration: ClassVar[dict[str, int]] = {"training": 7, "validation": 1}
        cuda_graph: ClassVar[dict[str, Any]] = {"training": graph, "validation": None}
        result: ClassVar[dict[str, Any]] = {"training": "losses", "validation": None}

        def __call__(self, **arguments: Any) -> str:
            is_replay = self.cuda_graph["training"] is not None
            number = self.curr_iteration["training"]
            assert iteration.ATTEMPTS.is_exact == (not is_replay)
            done.append(
                f"replay of {next(arguments['data_iterator'])}"
                if is_replay
                else f"number {number} with {next(arguments['data_iterator'])}"
            )
            if done == ["replay of 1", "replay of 2"]:
                iteration.ATTEMPTS.put_off(RowBoundError("too many rows"))
            self.curr_iteration["training"] += 1
            return done[-1]

    module = ModuleType("full_cuda_graph")
    module.FullCudaGraphWrapper = FullCudaGraphWrapper  # type: ignore[attr-defined]
    schedule.patch_full_graph(module)
    with mock.patch.object(iteration, "_bound_of", return_value=1.0):
        read, step = iter((1, 2, 3)), FullCudaGraphWrapper()
        model = repeats.zeroed_chunk()
        for _ in range(2):
            model.zero_grad_buffer()
            result = step(model=[model], data_iterator=read, forward_only=False)
    return [*done, result, str(FullCudaGraphWrapper.curr_iteration["training"])]


def test_a_graph_is_dropped_and_captured_later(two_ranks: RankPool) -> None:
    """Megatron captures in the iteration with its number of warm-up steps, 0 or more."""
    for done in two_ranks.run(graphed_iteration):
        assert done == [
            "replay of 1",
            "replay of 2",
            "reset",
            "number -1 with 2",
            "number -1 with 2",
            "0",
        ]


def measured_iterations(group: dist.ProcessGroup) -> list[Any]:
    """Numbers by which Megatron knows when to capture, and the bound after each iteration."""

    class FullCudaGraphWrapper:
        curr_iteration: ClassVar[dict[str, int]] = {"training": 0, "validation": 0}
        cuda_graph: ClassVar[dict[str, Any]] = {"training": None, "validation": None}
        result: ClassVar[dict[str, Any]] = {}

        def __call__(self, **arguments: Any) -> tuple[int, bool]:
            number = self.curr_iteration["training"]
            iteration.ATTEMPTS.note(dist.get_rank(group) + number + 21)
            self.curr_iteration["training"] += 1
            return number, iteration.ATTEMPTS.is_exact

    module = ModuleType("full_cuda_graph")
    module.FullCudaGraphWrapper = FullCudaGraphWrapper  # type: ignore[attr-defined]
    schedule.patch_full_graph(module)
    model, found = repeats.zeroed_chunk(), []
    iteration.ATTEMPTS.blocks = 0
    with (
        mock.patch.object(iteration, "_bound_of", return_value="auto"),
        mock.patch.object(iteration, "MEASURED", 2),
    ):
        step = FullCudaGraphWrapper()
        for _ in range(4):
            model.zero_grad_buffer()
            done = step(model=[model], data_iterator=None, forward_only=False)
            found.append((*done, iteration.ATTEMPTS.blocks))
    return found


def test_no_graph_is_captured_while_a_bound_is_measured(two_ranks: RankPool) -> None:
    """Megatron begins to count its iterations of warm-up when buffers have a size."""
    for found in two_ranks.run(measured_iterations):
        assert found == [(-1, True, 0), (-1, True, 24), (0, False, 24), (1, False, 24)]


def without_memory(group: dist.ProcessGroup) -> str:
    """The error of a repeat whose exact buffers do not fit."""

    def run(**arguments: Any) -> None:
        if iteration.ATTEMPTS.is_exact:
            raise torch.OutOfMemoryError("tried to allocate 9 GiB")
        iteration.ATTEMPTS.put_off(RowBoundError("too many rows"))

    model = repeats.zeroed_chunk()
    model.zero_grad_buffer()
    arguments = {"model": [model], "data_iterator": None, "forward_only": False}
    with mock.patch.object(iteration, "_bound_of", return_value=1.0):
        return refusal(group, lambda _: iteration.ITERATIONS.run(run, arguments, lambda: None))


def test_exact_buffers_that_do_not_fit_are_an_error(two_ranks: RankPool) -> None:
    for said in two_ranks.run(without_memory):
        assert said.startswith("RowBoundError: the iteration is repeated with exact buffers")
        assert "give --flashmoe-row-bound a number that holds from the start" in said
        assert said.endswith("make micro-batches smaller: tried to allocate 9 GiB")


def test_megatrons_own_repeats_give_way() -> None:
    class PagedStashRunner:
        def __init__(self, dispatcher: str) -> None:
            self.config = SimpleNamespace(moe_token_dispatcher_type=dispatcher, num_moe_experts=4)
            self.forward_backward_func = lambda **arguments: ("the schedule", arguments)

        def __call__(self, **arguments: Any) -> tuple[str, Any]:
            return "the runner", arguments

    module = ModuleType("paged_stash")
    module.PagedStashRunner = PagedStashRunner  # type: ignore[attr-defined]
    iteration.patch_stash(module)
    assert PagedStashRunner("flashmoe")(model=1) == ("the schedule", {"model": 1})
    assert PagedStashRunner("flex")(model=1) == ("the runner", {"model": 1})


def train_and_die(group: dist.ProcessGroup, case: Case) -> Trained:
    """Kills rank 1 within the backward of a repeat."""
    backward = ReferenceBackend.backward

    def backward_or_die(self: ReferenceBackend, *args: Any, **options: Any) -> Any:
        if self.attempts.is_exact and dist.get_rank(group) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return backward(self, *args, **options)

    ReferenceBackend.backward = backward_or_die  # type: ignore[method-assign]
    return train(group, case)


def test_a_rank_that_dies_in_a_repeat_ends_the_others(two_ranks: RankPool) -> None:
    """They end by an error of their own, and do not wait for it any longer."""
    with pytest.raises(RankError, match="exit code -9") as ended:
        two_ranks.run(train_and_die, Case(EP2))
    assert "rank 0: an exchange with the other 1 ranks" in str(ended.value)
    assert "did not finish" not in str(ended.value)
