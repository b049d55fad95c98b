"""FlashMoE behind Megatron's megakernel interface; its outputs are compared in test_layer."""

import contextlib
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flashmoe_megatron.adapters import megatron as adapter
from flashmoe_megatron.adapters.megatron.arguments import extend_parser
from flashmoe_megatron.adapters.megatron.config import refusals
from flashmoe_megatron.adapters.patch import original_of
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.oracle import assert_close
from tests.distributed import RankPool
from tests.megatron.harness import (
    MICRO_BATCH,
    SEQ_LENGTH,
    Layout,
    megatron_parser,
    prepare,
    transformer_config,
)
from tests.megatron.layers import make_layer, megakernel_of

STAGES = Layout(expert=2, pipeline=2)


def layer_numbers(group: dist.ProcessGroup, given: list[int | None]) -> tuple[int, list[int]]:
    """This rank's stage, and the numbers in its records."""
    prepare(STAGES)
    from megatron.core import parallel_state

    config = transformer_config(STAGES, "flashmoe")
    numbers = []
    for number in given:
        layer = make_layer(config)
        backend = megakernel_of(layer, **({} if number is None else {"layer_number": number}))
        x = torch.randn(SEQ_LENGTH, MICRO_BATCH, 64)
        computes = backend._routed.backend
        computes.take_records()
        backend(x, *layer.route(x))
        numbers += [record.layer for record in computes.take_records()]
    return parallel_state.get_pipeline_model_parallel_rank(), numbers


def test_layers_are_told_apart(four_ranks: RankPool) -> None:
    by_stage: dict[int, list[int]] = {}
    for stage, numbers in four_ranks.run(layer_numbers, [None, None, None]):
        assert by_stage.setdefault(stage, numbers) == numbers  # the same on ranks of one stage
        assert sorted(set(numbers)) == numbers
        assert len(numbers) == 3
    first, second = by_stage[0], by_stage[1]
    assert first[-1] - first[0] == 4  # from wherever layers of other tests have left the count
    assert [number + 1 for number in first] == second


def test_a_number_that_is_known_is_taken(four_ranks: RankPool) -> None:
    for _, numbers in four_ranks.run(layer_numbers, [7, 5]):
        assert numbers == [6, 4]


class OtherBackend(torch.nn.Module):
    """Stands for the backend that NVIDIA's package has."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        self.arguments = arguments


def nvidia_factory() -> ModuleType:
    """Three functions that choose by the configuration's name, and know one and no other."""
    module = ModuleType("factory")

    def chosen(config: Any, result: Any, default: Any) -> Any:
        name = config.moe_megakernel_backend
        if name not in (None, "other"):
            raise ValueError(f"no megakernel {name!r}")
        return result if name else default

    def prepare(config: Any) -> Any:
        return chosen(config, "another config", config)

    def init_context(config: Any) -> Any:
        return chosen(config, "a context", contextlib.nullcontext())

    def build(
        *,
        config: Any,
        ep_group: Any,
        routed_experts: Any,
        shared_experts: Any,
        num_local_experts: int,
    ) -> Any:
        given = {"config": config, "num_local_experts": num_local_experts}
        return chosen(config, OtherBackend(**given), None)

    module.build_megakernel_backend = build  # type: ignore[attr-defined]
    module.prepare_megakernel_shared_expert_config = prepare  # type: ignore[attr-defined]
    module.megakernel_shared_expert_init_context = init_context  # type: ignore[attr-defined]
    return module


def made_by_the_factory(group: dist.ProcessGroup) -> list[Any]:
    """What each function answers for each name, and how far outputs are from the layer's own."""
    layout = Layout(expert=2)
    prepare(layout)
    from flashmoe_megatron.adapters.megatron.megakernel import patch_factory

    factory = nvidia_factory()
    patch_factory(factory)
    results: list[Any] = []
    for name in ("flashmoe", "other", None, "unknown"):
        config = transformer_config(layout, "alltoall", moe_shared_expert_intermediate_size=64)
        config.moe_megakernel_backend = name
        layer = make_layer(config)
        try:
            is_same = factory.prepare_megakernel_shared_expert_config(config) is config
            context = factory.megakernel_shared_expert_init_context(config)
            made = factory.build_megakernel_backend(
                config=config,
                ep_group=layer.ep_group,
                routed_experts=layer.experts,
                shared_experts=layer.shared_experts,
                num_local_experts=layer.num_local_experts,
            )
        except ValueError as error:
            results.append(str(error))
            continue
        results.append((type(made).__name__, is_same, type(context).__name__))
        if name == "flashmoe":
            x = torch.randn(SEQ_LENGTH, MICRO_BATCH, 64)
            want, _ = layer(x)
            got = made(x, *layer.route(x))
            assert isinstance(got, torch.Tensor)
            assert not list(made.parameters())
            assert not made.state_dict()
            assert_close("output", got, want, rel_l2=1e-5)
    return results


def test_nvidias_factory_gets_a_branch(two_ranks: RankPool) -> None:
    for ours, other, none, unknown in two_ranks.run(made_by_the_factory):
        assert ours == ("FlashMoEMegakernel", True, "nullcontext")
        assert other == ("OtherBackend", False, "str")
        assert none == ("NoneType", True, "nullcontext")
        assert unknown == "no megakernel 'unknown'"


def test_the_name_is_a_choice_where_there_is_one() -> None:
    for has_megakernels in (False, True):
        parser = megatron_parser()
        if has_megakernels:
            parser.add_argument("--moe-megakernel-backend", choices=["other"])
        line = ["--moe-megakernel-backend", "flashmoe"] if has_megakernels else []
        args = extend_parser(parser).parse_args(line)
        assert getattr(args, "moe_megakernel_backend", None) == ("flashmoe" if line else None)


def test_a_configuration_with_the_name_is_ours_to_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron's checks, which know one backend, are shown none; ours refuse as ever."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    adapter.install()
    shown = []
    checked = TransformerConfig.__post_init__
    original = original_of(checked)

    def checks(config: Any) -> None:
        shown.append(config.moe_megakernel_backend)
        original(config)

    monkeypatch.setattr(TransformerConfig, "__post_init__", refusals._checked_post_init(checks))
    monkeypatch.setattr(TransformerConfig, "moe_megakernel_backend", "flashmoe", raising=False)
    config = transformer_config(Layout(), "alltoall")
    assert config.moe_megakernel_backend == "flashmoe"
    assert shown == [None]
    with pytest.raises(ConfigError, match="--moe-apply-probs-on-input"):
        transformer_config(Layout(), "alltoall", moe_apply_probs_on_input=True, moe_router_topk=1)
