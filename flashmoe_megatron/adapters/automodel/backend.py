"""The backend configuration of Automodel with our dispatcher and its options."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nemo_automodel.components.models.common import BackendConfig as StockBackendConfig

from flashmoe_megatron.adapters.automodel.seam import DISPATCHER
from flashmoe_megatron.adapters.options import ModuleOptions
from flashmoe_megatron.errors import ConfigError
from flashmoe_megatron.options import make_options


@dataclass(kw_only=True)
class BackendConfig(StockBackendConfig):  # type: ignore[misc]
    """As Automodel's, with the dispatcher "flashmoe".

    Attributes:
        flashmoe: Options of the experts by name, fields of
            :class:`~flashmoe_megatron.adapters.options.ModuleOptions`.
    """

    dispatcher: str = DISPATCHER
    experts: str = "torch_mm"
    flashmoe: Any = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuses another dispatcher, and options that are unknown or have no meaning."""
        if self.dispatcher != DISPATCHER:
            raise ConfigError(
                f"dispatcher={self.dispatcher!r} in flashmoe_megatron.automodel.BackendConfig: "
                f"wanted {DISPATCHER!r}, or Automodel's own BackendConfig"
            )
        if not isinstance(self.flashmoe, ModuleOptions):
            given = self.flashmoe
            if hasattr(given, "to_dict"):  # a node of a recipe's YAML
                given = given.to_dict()
            if not isinstance(given, Mapping):
                raise ConfigError(f"flashmoe={given!r}: wanted options by name")
            self.flashmoe = make_options(ModuleOptions, given)
        super().__post_init__()
