"""``ep_implementation="flashmoe"``: experts that transformers has spread over ranks, in one launch.

Imported only where transformers has the seam, from release 5.23 on.
"""

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers.distributed.expert_parallel import EPImplementation

from flashmoe_megatron.adapters.transformers.experts import apply_experts


class FlashMoEParallel(EPImplementation):  # type: ignore[misc]
    """Dispatch, experts and combine of one module over its expert-parallel mesh.

    The ranks of a tensor-parallel group hold the same tokens: each sends its share of them, and the
    outputs are gathered.
    """

    def __init__(self, experts: Any, ep_mesh: Any, tp_mesh: Any) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        self._experts = experts

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Applies the experts of all ranks to this rank's tokens. Collective over both meshes.

        Args:
            hidden_states: ``[num_tokens, hidden]``, as the result.
            top_k_index: ``[num_tokens, k]`` ids of all ranks' experts.
            top_k_weights: ``[num_tokens, k]``.
        """
        given = (hidden_states, top_k_index, top_k_weights)
        has_all_rows = self.tp_mesh.size() == 1
        x, index, weights = given if has_all_rows else map(self._own_rows, given)
        out = apply_experts(self._experts, x, index, weights, self.ep_mesh.get_group())
        if has_all_rows:
            return out
        shared = DTensor.from_local(
            out,
            self.tp_mesh,
            [Shard(0)],
            shape=hidden_states.shape,
            stride=hidden_states.stride(),
            run_check=False,
        )
        return shared.full_tensor()

    def _own_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's share of rows that all ranks of the tensor-parallel group hold."""
        same = DTensor.from_local(tensor, self.tp_mesh, [Replicate()], run_check=False)
        return same.redistribute(self.tp_mesh, [Shard(0)]).to_local()
