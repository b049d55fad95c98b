"""torchtitan's MoE models on flashmoe, by an override that torchtitan finds under its path."""

if __name__ == "__main__":
    from flashmoe_megatron.door import describe

    raise SystemExit(describe("flashmoe_megatron.torchtitan", __doc__))

from typing import Any

from flashmoe_megatron.releases import TORCHTITAN

with TORCHTITAN.needed():
    from torchtitan.config import override
    from torchtitan.models.common.moe import RoutedExperts

    from flashmoe_megatron.adapters.torchtitan.override import replace_routed_experts


@override(  # type: ignore[misc]
    target=RoutedExperts.Config, description="Routed experts in one launch of flashmoe."
)
def routed_experts(config: Any, **options: Any) -> Any:
    """The function that ``--override.imports flashmoe_megatron.torchtitan.routed_experts`` names.

    The options are fields of :class:`~flashmoe_megatron.adapters.options.ModuleOptions`, as JSON
    after the name and "="; see
    :func:`~flashmoe_megatron.adapters.torchtitan.override.replace_routed_experts`.
    """
    return replace_routed_experts(config, **options)


__all__ = ["routed_experts"]
