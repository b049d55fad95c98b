"""Gradients that are reduced in gaps: when, in which order, and the same losses as otherwise."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from flashmoe_megatron.adapters.megatron.buckets import ddp as wrapped_ddp
from flashmoe_megatron.adapters.megatron.buckets import sizes
from flashmoe_megatron.adapters.patch import original_of
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.measured.fit import write_fit
from flashmoe_megatron.separate.slices import GradientSlices
from tests.distributed import RankPool
from tests.fits import make_fit
from tests.megatron.harness import Case, Layout, build_model, prepare, train, transformer_config

EP2 = Layout(expert=2)
TOLERANCE = 1e-5
ITERATIONS = 4


@pytest.fixture
def fit(tmp_path: Path) -> str:
    """A machine on which a few tens of KB fit the gaps of this model's backward."""
    path = tmp_path / "fit.json"
    write_fit(path, make_fit(product=(1e-6, 1e-10), copy=(1e-6, 1e-10)))
    return str(path)


def case_of(fit: str, *, backend: str = "scheduled", **ddp: Any) -> Case:
    settings = {"backend": backend, "slice_gradients": True, "degree_fit": fit, "degree": "2"}
    given = {"overlap_grad_reduce": True, "bucket_size": None, **ddp}
    return Case(EP2, settings=settings, ddp=given, steps=ITERATIONS)


def plain(case: Case, **settings: Any) -> Case:
    """The same training without slices."""
    changed = {**case.settings, "slice_gradients": False, **settings}
    return Case(EP2, settings=changed, ddp=case.ddp, steps=ITERATIONS)


def watch(group: dist.ProcessGroup, case: Case, *, too_early: bool) -> dict[str, Any]:
    """Trains, and says where reductions started, of how many bytes, and of incomplete gradients.

    ``too_early`` is a mutant: a bucket is reduced when it has its first gradient, not its last.
    """
    prepare(EP2)
    from megatron.core.distributed import param_and_grad_buffer

    bucket_group = param_and_grad_buffer._ParamAndGradBucketGroup
    seen: dict[str, Any] = {"places": [], "bytes": set(), "incomplete": 0}
    place = "elsewhere"

    with pytest.MonkeyPatch.context() as patches:
        for name in ("take", "leave", "put", "drain"):
            method = getattr(GradientSlices, name)

            def at(*args: Any, name: str = name, method: Any = method, **kwargs: Any) -> Any:
                nonlocal place
                outer, place = place, name
                try:
                    return method(*args, **kwargs)
                finally:
                    place = outer

            patches.setattr(GradientSlices, name, at)
        put = GradientSlices.put

        def watched_put(self: Any, num_bytes: int, start: Any) -> None:
            (found,) = (one.cell_contents for one in start.__closure__ if is_group(one))
            complete = len(found.per_param_grad_ready_counts) == len(found.params)

            def begin() -> None:
                seen["places"].append(place)
                seen["bytes"].add(num_bytes)
                seen["incomplete"] += not complete
                start()

            put(self, num_bytes, begin)

        def is_group(cell: Any) -> bool:
            return isinstance(cell.cell_contents, bucket_group)

        patches.setattr(GradientSlices, "put", watched_put)
        if too_early:
            patches.setattr(
                original_of(bucket_group.register_grad_ready), "__code__", START_AT_FIRST.__code__
            )
        seen["losses"] = train(group, case, True).losses
    return seen


def START_AT_FIRST(self: Any, param: Any, force_all_reduce: Any = False) -> None:
    """In place of Megatron's method."""
    if self.is_last_microbatch:
        self.per_param_grad_ready_counts[param] = 1
        if not self.is_first_batch and len(self.per_param_grad_ready_counts) == 1:
            self.start_grad_sync(force_all_reduce=force_all_reduce)


def relative(found: list[float], want: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(found, want, strict=True))


@pytest.mark.parametrize("distributed_optimizer", [True, False])
def test_losses_are_those_without_slices_and_a_mutant_is_caught(
    distributed_optimizer: bool, fit: str, two_ranks: RankPool
) -> None:
    case = case_of(fit, use_distributed_optimizer=distributed_optimizer)
    want = two_ranks.run(train, plain(case), True)
    found = two_ranks.run(watch_right, case)
    for one, other in zip(found, want, strict=True):
        assert relative(one["losses"], other.losses) < TOLERANCE
        assert one["incomplete"] == 0
        assert {"take", "drain"} <= set(one["places"]), "gaps take some, and the end the rest"
        assert len(one["places"]) > 3 * (ITERATIONS - 1), "buckets are pieces"
    assert found[0]["places"] == found[1]["places"], "ranks start them in one order"
    for one, other in zip(two_ranks.run(watch_mutant, case), want, strict=True):
        assert one["incomplete"] > 0
        assert relative(one["losses"], other.losses) > 10 * TOLERANCE


def watch_right(group: dist.ProcessGroup, case: Case) -> dict[str, Any]:
    return watch(group, case, too_early=False)


def watch_mutant(group: dist.ProcessGroup, case: Case) -> dict[str, Any]:
    return watch(group, case, too_early=True)


def buckets(group: dist.ProcessGroup, case: Case) -> tuple[list[float], int | None]:
    """The losses, and the size of buckets that Megatron was told."""
    prepare(EP2)
    from megatron.core.distributed import DistributedDataParallelConfig

    sizes = []
    with pytest.MonkeyPatch.context() as patches:
        made = DistributedDataParallelConfig.__setattr__

        def note(self: Any, name: str, value: Any) -> None:
            if name == "bucket_size":
                sizes.append(value)
            made(self, name, value)

        patches.setattr(DistributedDataParallelConfig, "__setattr__", note)
        losses = train(group, case, True).losses
    return losses, sizes[-1]


def test_other_backends_get_buckets_that_fit(fit: str, two_ranks: RankPool) -> None:
    case = case_of(fit, backend="reference")
    want = two_ranks.run(train, plain(case), True)
    for (losses, size), other in zip(two_ranks.run(buckets, case), want, strict=True):
        assert relative(losses, other.losses) < TOLERANCE
        assert size is not None
        assert 100 < size < 100_000, "not Megatron's default of 40 million"


class Noted:
    """Stands for the queue: notes what is drained and queued."""

    def __init__(self, notes: list[str]) -> None:
        self.notes = notes

    def drain(self) -> None:
        self.notes.append("drained")

    def put(self, num_bytes: int, start: Callable[[], None]) -> None:
        self.notes.append(f"queued {num_bytes}")


class BucketGroup:
    """A bucket group of Megatron's, as far as it starts a reduction."""

    is_last_microbatch = False

    def __init__(self, notes: list[str]) -> None:
        self.ddp_config = SimpleNamespace(flashmoe_slices=Noted(notes))
        self.buckets = [SimpleNamespace(grad_data=SimpleNamespace(nbytes=64))] * 2
        self.notes = notes

    def start(self) -> None:
        self.notes.append("started")

    def tell(self, is_last: bool) -> None:
        if is_last:
            self.start_grad_sync()

    start_grad_sync = wrapped_ddp._start_grad_sync(start)
    register_grad_ready = wrapped_ddp._register_grad_ready(tell)


def test_a_reduction_that_the_program_starts_is_behind_all_that_wait() -> None:
    """On every rank, whichever gaps each has had by then; only the last gradient queues one."""
    notes: list[str] = []
    group, other = BucketGroup(notes), BucketGroup(notes)
    group.register_grad_ready(False)
    group.register_grad_ready(True)
    assert notes == ["queued 128"]
    notes.clear()
    for one in (group, other):
        one.start_grad_sync()
    assert notes == ["drained", "started"] * 2


def test_each_model_is_planned_for_once_though_one_cannot_be_wrapped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planned: list[str] = []

    def size_buckets(ddp_config: Any, chunks: list[str], *, will_scatter: bool) -> None:
        planned.extend(chunks)

    monkeypatch.setattr(sizes, "_size_buckets", size_buckets)
    monkeypatch.setattr(sizes, "current_value", lambda name: name == "slice_gradients")

    def ddp(module: str, ddp_config: Any) -> str:
        if module == "bad":
            raise ConfigError("it cannot be wrapped")
        return module

    inner = sizes.planning(ddp, "module")

    def script(model_chunks: list[str], ddp_config: Any) -> list[str]:
        return [inner(chunk, ddp_config) for chunk in model_chunks]

    wrap = sizes.planning(script, "model_chunks")
    config = SimpleNamespace(use_distributed_optimizer=True)
    with pytest.raises(ConfigError):
        wrap(["bad"], config)
    assert wrap(["one", "two"], config) == ["one", "two"]
    assert inner("three", config) == "three"
    assert planned == ["bad", "one", "two", "three"]


SCRIPT_SIZE = 40_000_000
"""What Megatron's script gives buckets whose size nobody has chosen."""


def script(kind: str, read: list[int | None]) -> Callable[..., Any]:
    """Wraps a model as Megatron's script does, and notes the sizes that are read of buckets.

    The script is no part of the package megatron-core. ``test_megatron_lm.py`` runs the real one.

    Args:
        kind: "get_model" makes DDP itself, until Megatron-Core 0.17; "layouts" has it made behind
            layouts, and "builder" is what a configuration's model comes through.
        read: Gets the sizes.
    """
    from megatron.core.distributed import DistributedDataParallel

    def wrap_model_chunks_with_ddp(
        model_chunks: list[Any], config: Any, ddp_config: Any, *, bucket_sizes: Any = None
    ) -> Any:
        read.extend(bucket_sizes)
        return DistributedDataParallel(config, ddp_config, model_chunks[0])

    def _ddp_wrap(model: list[Any], config: Any, ddp_config: Any) -> Any:
        ddp_config.bucket_size = ddp_config.bucket_size or SCRIPT_SIZE
        read.append(ddp_config.bucket_size)
        return DistributedDataParallel(config, ddp_config, model[0])

    def get_model(model: Any, config: Any, ddp_config: Any) -> Any:
        ddp_config.bucket_size = ddp_config.bucket_size or SCRIPT_SIZE
        if kind == "get_model":
            return DistributedDataParallel(config, ddp_config, model)
        sizes = [ddp_config.bucket_size, None]
        wrap = training.wrap_model_chunks_with_ddp
        return wrap([model], config, ddp_config, bucket_sizes=sizes)

    if kind == "builder":
        builders: Any = SimpleNamespace(_ddp_wrap=_ddp_wrap)
        sizes.patch_builders(builders)
        return lambda model, *given: builders._ddp_wrap([model], *given)
    training: Any = SimpleNamespace(get_model=get_model)
    if kind == "layouts":
        training.wrap_model_chunks_with_ddp = wrap_model_chunks_with_ddp
    sizes.patch_training(training)
    return lambda *given: training.get_model(*given)


def cut(
    group: dist.ProcessGroup, fit: str, kind: str, flags: dict[str, int], own: int | None
) -> tuple[int, list[int | None], list[list[int]]]:
    """Buckets of a model that a program wraps: their size, what was read of it, and their ends.

    Args:
        group: All ranks.
        fit: What says the gaps.
        kind: "program" calls DDP itself, else see :func:`script`.
        flags: The script's arguments for buckets.
        own: The size in DDP's configuration.
    """
    prepare(EP2, **case_of(fit).settings)
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    config = transformer_config(EP2, "flashmoe")
    (model,) = build_model(config, EP2)
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=True, bucket_size=own
    )
    args = SimpleNamespace(**{"ddp_bucket_size": None, "ddp_num_buckets": None, **flags})
    read: list[int | None] = []
    with pytest.MonkeyPatch.context() as patches:
        variables = SimpleNamespace(_GLOBAL_ARGS=args)
        patches.setitem(sys.modules, "megatron.training.global_vars", variables)
        if kind == "program":
            wrapped = DistributedDataParallel(config, ddp_config, model)
        else:
            wrapped = script(kind, read)(model, config, ddp_config)
    size = ddp_config.bucket_size
    ends = []
    for buffer in (*wrapped.buffers, *wrapped.expert_parallel_buffers):
        ends.append([sum(each.numel() for each in one.params_list) for one in buffer.buckets])
        for one, numel in zip(buffer.buckets[:-1], ends[-1], strict=False):
            assert numel >= size > numel - one.params_list[-1].numel()
    return size, read, ends


@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        ("get_model", {"ddp_num_buckets": 2}),
        ("layouts", {"ddp_bucket_size": 45_000}),
        ("builder", {}),
        ("program", {}),
    ],
)
def test_buckets_are_pieces_unless_the_user_has_chosen_a_size(
    kind: str, flags: dict[str, int], fit: str, two_ranks: RankPool
) -> None:
    for size, read, ends in two_ranks.run(cut, fit, kind, {}, None):
        assert 10_000 < size < 30_000
        assert set(read) <= {size, None}, "layouts have pieces, too"
        assert [len(each) for each in ends] == [3, 4]
    for size, read, ends in two_ranks.run(cut, fit, kind, flags, 45_000):
        assert size == 45_000
        assert set(read) <= {size, None}
        assert [len(each) for each in ends] == [1, 2]


def test_a_layout_of_muons_scatters_though_its_configuration_says_so_later() -> None:
    given: dict[str, Any] = {"ddp_config": SimpleNamespace(use_distributed_optimizer=False)}
    assert not sizes._will_scatter(given)
    muon = {**given, "use_layer_wise_distributed_optimizer": True}
    assert sizes._will_scatter({**muon, "use_layer_wise_param_layout": True})
    assert not sizes._will_scatter({**muon, "use_layer_wise_param_layout": False})


def muons_layout(model: Any, ddp_config: Any, bucket_size: int) -> dict[str, Any]:
    """DDP's argument that the script computes for Muon; releases without it get the marks alone."""
    from megatron.core.optimizer import layer_wise_optimizer

    parameters = list(model.parameters())
    if not hasattr(layer_wise_optimizer, "tag_params_for_buffer_routing"):
        for one in parameters:
            has_words = getattr(one, "is_embedding_or_output_parameter", False)
            one.is_managed_by_layer_wise_optimizer = one.dim() == 2 and not has_words
        return {}
    layer_wise_optimizer.tag_params_for_buffer_routing([model])
    ddp_config.use_distributed_optimizer = True
    compute = layer_wise_optimizer.LayerWiseDistributedOptimizer.compute_full_param_layout
    layout = compute(parameters, bucket_size, 2, ddp_config, expert_data_parallel_world_size=1)
    return {"full_param_layout": layout}


def cut_for_muon(
    group: dist.ProcessGroup, fit: str, own: int | None, has_layout: bool
) -> tuple[int, list[str], int]:
    """Buckets that the script makes for Muon: their size, what is said, and the largest dense one.

    The last is 0 where a layout was wanted from a release that has none.

    Args:
        group: All ranks.
        fit: What says the gaps.
        own: The size in the script's arguments.
        has_layout: Whether the script computes Muon's layout.
    """
    prepare(EP2, **case_of(fit).settings)
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    def wrap_model_chunks_with_ddp(
        model_chunks: list[Any],
        config: Any,
        ddp_config: Any,
        *,
        use_layer_wise_distributed_optimizer: bool,
        use_layer_wise_param_layout: bool,
        bucket_sizes: list[int],
    ) -> Any:
        (model,), layout = model_chunks, {}
        if use_layer_wise_param_layout:
            layout = muons_layout(model, ddp_config, bucket_sizes[0])
        return DistributedDataParallel(config, ddp_config, model, **layout)

    def get_model(model: Any, config: Any, ddp_config: Any) -> Any:
        ddp_config.bucket_size = own or SCRIPT_SIZE
        return training.wrap_model_chunks_with_ddp(
            [model],
            config,
            ddp_config,
            use_layer_wise_distributed_optimizer=True,
            use_layer_wise_param_layout=has_layout,
            bucket_sizes=[ddp_config.bucket_size],
        )

    training: Any = SimpleNamespace(
        get_model=get_model, wrap_model_chunks_with_ddp=wrap_model_chunks_with_ddp
    )
    sizes.patch_training(training)
    config = transformer_config(EP2, "flashmoe")
    (model,) = build_model(config, EP2)
    ddp_config = DistributedDataParallelConfig(overlap_grad_reduce=True)
    args = SimpleNamespace(ddp_bucket_size=own, ddp_num_buckets=None)
    told: list[str] = []
    with pytest.MonkeyPatch.context() as patches:
        variables = SimpleNamespace(_GLOBAL_ARGS=args)
        patches.setitem(sys.modules, "megatron.training.global_vars", variables)
        patches.setattr(sizes.logger, "warning", lambda text, *given: told.append(text % given))
        wrapped = training.get_model(model, config, ddp_config)
    buckets = [bucket for buffer in wrapped.buffers for bucket in buffer.buckets]
    is_made = ddp_config.use_distributed_optimizer == has_layout
    largest = max(each.grad_data.numel() for each in buckets)
    return ddp_config.bucket_size, told, largest * is_made


def test_pieces_that_muons_layout_has_no_room_for_are_told(fit: str, two_ranks: RankPool) -> None:
    (piece, told, largest), (_, others, _) = two_ranks.run(cut_for_muon, fit, None, True)
    (message,) = told
    assert f"--flashmoe-slice-gradients: pieces of {piece} elements fit the gaps" in message
    least = 2 * 192 * 64  # the matrix of queries, keys and values, on two ranks
    assert f"here up to {least} elements; pass --no-use-layer-wise-param-layout" in message
    assert others == [], "rank 0 speaks for all"
    assert largest == 0 or largest >= least
    for own, has_layout in ((45_000, True), (None, False)):
        for _, told, largest in two_ranks.run(cut_for_muon, fit, own, has_layout):
            assert told == []
            if not has_layout:
                assert largest < least, "buckets that fit"


def refusals(group: dist.ProcessGroup, fit: str) -> list[str]:
    said = []
    for layout, settings, ddp in (
        (EP2, {}, {"overlap_grad_reduce": False}),
        (EP2, {"degree_fit": None}, {}),
        (EP2, {"degree_fit": "/nowhere"}, {}),
        (Layout(expert=1), {}, {}),
    ):
        case = case_of(fit, **ddp)
        changed = {**case.settings, **settings}
        with pytest.raises(ConfigError) as caught:
            train(group, Case(layout, settings=changed, ddp=case.ddp), True)
        said.append(str(caught.value))
    return said


def refused_fits(group: dist.ProcessGroup, fits: list[str]) -> str:
    with pytest.raises(ConfigError) as caught:
        train(group, case_of(fits[dist.get_rank(group)], backend="reference"), True)
    return str(caught.value)


def test_fits_that_differ_are_refused_on_every_rank(
    fit: str, tmp_path: Path, two_ranks: RankPool
) -> None:
    other = tmp_path / "other.json"
    slow = {"reduce_scatter": (1e-6, 2e-8), "all_reduce": (1e-6, 2e-8)}
    write_fit(other, make_fit(product=(1e-6, 1e-10), copy=(1e-6, 1e-10), **slow))
    for said in two_ranks.run(refused_fits, [fit, str(other)]):
        assert said.startswith("the ranks' fits give different reductions of gradients: ")
        assert said.endswith(" on rank 1; wanted one fit")


def test_what_cannot_be_planned_is_refused_on_every_rank(fit: str, two_ranks: RankPool) -> None:
    for said in two_ranks.run(refusals, fit):
        assert "--flashmoe-slice-gradients wants --overlap-grad-reduce" in said[0]
        assert "--flashmoe-slice-gradients True: wanted a degree_fit beside it" in said[1]
        assert "rank 0: fit /nowhere: cannot be read" in said[2]
        assert "wanted false where each rank has all experts" in said[3]
