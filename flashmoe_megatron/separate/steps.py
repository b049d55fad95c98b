"""Chooses how a layer's steps are made: by kernels and grouped products, or torch's operators."""

import functools
from collections.abc import Sequence
from typing import Protocol, cast

import torch

from flashmoe_megatron.config import MoEConfig
from flashmoe_megatron.separate import plain
from flashmoe_megatron.separate.plan import Cut, Indices, Sorted
from flashmoe_megatron.separate.products import Matrices
from flashmoe_megatron.weights import ExpertWeights, WeightGrad


class Steps(Protocol):
    """The steps of a layer, as :mod:`~flashmoe_megatron.separate.plain` defines them."""

    def sort_routes(
        self, config: MoEConfig, probs: torch.Tensor, routing_map: torch.Tensor
    ) -> Sorted:
        """Orders the routes."""

    def cut_routes(
        self, token_idx: torch.Tensor, place: torch.Tensor, ends: torch.Tensor, degree: int
    ) -> Cut:
        """Brings routes into the order of parts."""

    def index_rows(self, received: torch.Tensor, num_rows: int, degree: int) -> Indices:
        """Finds where rows are in so many parts, and in one."""

    def put_rows(self, target: torch.Tensor, index: torch.Tensor, rows: torch.Tensor) -> None:
        """Copies rows to where they belong."""

    def sum_routes(self, rows: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        """Sums each token's rows."""

    def weighted_activation(
        self, config: MoEConfig, preact: torch.Tensor, row_probs: torch.Tensor
    ) -> torch.Tensor:
        """Applies the activation and the routing weights."""

    def weighted_activation_backward(
        self,
        config: MoEConfig,
        preact: torch.Tensor,
        row_probs: torch.Tensor,
        grad_weighted: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Differentiates that."""

    def is_grouped(self, rows: torch.Tensor) -> bool:
        """Says whether products of such rows need no numbers of rows on the host."""

    def matrices(self, weights: ExpertWeights) -> tuple[Matrices, Matrices]:
        """Orients weights for :meth:`product`: those of fc1, and those of fc2."""

    def product(
        self, rows: torch.Tensor, of_experts: Matrices, ends: torch.Tensor, counts: Sequence[int]
    ) -> torch.Tensor:
        """Multiplies each row by its expert's matrix."""

    def grad_product(
        self, rows: torch.Tensor, of_experts: Matrices, ends: torch.Tensor, counts: Sequence[int]
    ) -> torch.Tensor:
        """Multiplies gradients of the layer's output, in a dtype at least as wide as theirs."""

    def weight_grad(
        self, left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor, counts: Sequence[int]
    ) -> torch.Tensor:
        """Multiplies the inputs of an expert's matrix by the gradients of its outputs."""

    def add_weight_grad(
        self,
        targets: Sequence[WeightGrad],
        left: torch.Tensor,
        right: torch.Tensor,
        ends: torch.Tensor,
        counts: Sequence[int],
    ) -> None:
        """Adds or writes that to where it goes."""


def steps_for(x: torch.Tensor) -> Steps:
    """The steps for tokens such as these.

    Raises:
        ImportError: They are on a GPU, and Triton, which comes with torch there, is missing.
    """
    return _kernels() if x.is_cuda and x.dtype != torch.float64 else cast(Steps, plain)


@functools.cache
def _kernels() -> Steps:
    from flashmoe_megatron.separate import kernels  # a processor needs no Triton

    return cast(Steps, kernels)
