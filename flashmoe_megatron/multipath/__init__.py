"""Large transfers over all links of a machine at once; README.md says where they pay."""

from flashmoe_megatron.multipath.multipath import (
    MIN_BYTES,
    MOST_SUMMED,
    Multipath,
    Reduction,
    Work,
)
from flashmoe_megatron.multipath.transfers import LinkTotals

__all__ = ["MIN_BYTES", "MOST_SUMMED", "LinkTotals", "Multipath", "Reduction", "Work"]
