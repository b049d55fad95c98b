"""Stands in for Transformer Engine's CUDA graphs of layers where there is no GPU.

A replay computes what Megatron would have captured, and hands it on as a graph does: in the same
storage every time, which is somebody else's again once the graph's backward has run.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


def graph_layers(model: list[Any], num_graphs: int) -> None:
    """Gives every Transformer layer its graphs, one for each micro-batch that is under way.

    Args:
        model: Chunks in Megatron's DistributedDataParallel. Hooks that wait for parameters do
            nothing in a capture; before a replay, Megatron calls them itself.
        num_graphs: For each layer; none changes nothing.
    """
    from megatron.core.transformer.transformer_layer import TransformerLayer

    layers = [(chunk, each) for chunk in model for each in chunk.modules() if num_graphs]
    for chunk, layer in layers:
        if isinstance(layer, TransformerLayer):
            layer.cuda_graphs = [_Graph(layer) for _ in range(num_graphs)]
            layer._get_te_cuda_graph_replay_args = _replay_args
            if chunk.ddp_config.overlap_param_gather:
                layer.setup_manual_hooks(chunk._make_forward_pre_hook)


def _replay_args(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a graph is called with; Megatron's own asks for Transformer Engine."""
    hidden = args or (kwargs.pop("hidden_states"),)
    return hidden, {name: value for name, value in kwargs.items() if value is not None}


@contextlib.contextmanager
def _capturing() -> Iterator[None]:
    from megatron.core.transformer import cuda_graphs

    cuda_graphs._set_capture_start()
    try:
        yield
    finally:
        cuda_graphs._set_capture_end()


class _Graph:
    """A graph of one layer, as far as its configuration wants it captured."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self.buffers: list[torch.Tensor] = []

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        dispatcher = getattr(self.layer.mlp, "token_dispatcher", None)
        before = dict(vars(dispatcher or self))
        with _capturing():
            outputs = self.layer._te_cuda_graph_capture(*args, **kwargs)
        # A replay sets no attributes, so that tensors come out as outputs or not at all.
        for name, value in vars(dispatcher or self).items():
            if isinstance(value, torch.Tensor):
                setattr(dispatcher, name, before.get(name))
        if not self.buffers:
            self.buffers = [torch.empty_like(output) for output in outputs]
        result: tuple[torch.Tensor, ...] = _Replay.apply(self, *outputs)
        return result

    def backward_dw(self) -> None:
        """Computes no gradients: the layers here do not delay them."""

    def forget(self) -> None:
        """Overwrites what the last replay handed on."""
        for buffer in self.buffers:
            buffer.fill_(torch.nan if buffer.is_floating_point() else 1)


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graph: _Graph, *outputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.graph = graph
        for buffer, output in zip(graph.buffers, outputs, strict=True):
            buffer.copy_(output)
        static = tuple(buffer.detach() for buffer in graph.buffers)
        ctx.mark_non_differentiable(*(each for each in static if not each.is_floating_point()))
        return static

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        ctx.graph.forget()
        return None, *grads
