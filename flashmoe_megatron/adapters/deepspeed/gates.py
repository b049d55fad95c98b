"""Gates of DeepSpeed's native MoE layers that choose by the gates of papers.

They are put in place before ``deepspeed.initialize``, which then finds their parameters as the
model's: in the optimizer, in ZeRO's partitions and in checkpoints. Imported after DeepSpeed.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from deepspeed.moe.sharded_moe import MOELayer, TopKGate
from torch import nn
from torch.nn import functional

from flashmoe_megatron.adapters.deepspeed.settings import SECTION, Settings
from flashmoe_megatron.gate_rules import (
    Choice,
    balance_loss,
    choose_gshard,
    choose_sigmoid,
    choose_xmoe,
    gshard_capacity,
    routes_to,
    xmoe_logits,
    xmoe_width,
)
from flashmoe_megatron.options import GateKind

Routes = tuple[torch.Tensor, None, int, torch.Tensor, None, torch.Tensor, torch.Tensor]
"""The results of ``TopKGate`` for sparse routes; capacity and places of a buffer are left out."""


class PaperGate(TopKGate):  # type: ignore[misc]
    """Takes the place of a layer's class ``TopKGate``; each gate defines :meth:`choose`."""

    wg: nn.Linear

    def choose(self, tokens: torch.Tensor) -> Choice:
        """Chooses experts of ``[tokens, hidden]`` in float32."""
        raise NotImplementedError

    def adopt(self) -> None:
        """Makes parameters of its own from those of the ``TopKGate`` that it was."""

    def forward(
        self,
        tokens: torch.Tensor,
        used_token: torch.Tensor | None = None,
        sparse_routes: bool = True,
    ) -> Routes:
        """Routes ``[tokens, hidden]``, and gives ``TopKGate``'s auxiliary loss, routes and counts.

        Args:
            tokens: In the dtype of the model.
            used_token: ``[tokens]``, 0 where a token is not in use: it has no expert and counts for
                no loss.
            sparse_routes: Has to be true; there are no other routes here.
        """
        assert sparse_routes
        with torch.autocast(tokens.device.type, enabled=False):
            used = torch.ones(len(tokens), dtype=torch.bool, device=tokens.device)
            if used_token is not None:
                used = used_token.bool()
            choice = self.choose(tokens[used].float())
        shape = (len(tokens), choice.topk_idx.shape[1])
        indices = choice.topk_idx.new_full(shape, -1)
        indices[used] = choice.topk_idx
        weights = choice.topk_weight.new_zeros(shape).index_put((used,), choice.topk_weight)
        num_experts = choice.scores.shape[1]
        counts = routes_to(choice.asked, num_experts)
        loss = balance_loss(choice)
        return loss, None, num_experts, indices.int().t(), None, weights.t(), counts

    def _logits(self, tokens: torch.Tensor) -> torch.Tensor:
        return functional.linear(tokens, self.wg.weight.to(tokens))


class GShardGate(PaperGate):
    """Routes as :class:`~flashmoe_megatron.gates.GShardGate`, with DeepSpeed's capacity.

    Its second choices are tried at random where DeepSpeed would sample them
    (``top2_2nd_expert_sampling``), while training.
    """

    def choose(self, tokens: torch.Tensor) -> Choice:
        """Chooses two experts of each token, as far as these have places."""
        logits = self._logits(tokens)
        capacity = None
        if self.drop_tokens:
            factor = self.capacity_factor if self.training else self.eval_capacity_factor
            most = gshard_capacity(len(tokens), logits.shape[1], factor)
            capacity = max(most or 0, self.min_capacity)
        drawn = None
        if self.training and self.top2_2nd_expert_sampling:
            drawn = torch.rand(len(tokens), device=tokens.device)
        return choose_gshard(logits, capacity=capacity, drawn=drawn)


class SigmoidGate(PaperGate):
    """Routes as :class:`~flashmoe_megatron.gates.SigmoidGate`."""

    def choose(self, tokens: torch.Tensor) -> Choice:
        """Chooses the largest logits."""
        return choose_sigmoid(self._logits(tokens), self.k)


class XMoEGate(PaperGate):
    """Routes as :class:`~flashmoe_megatron.gates.XMoEGate` does by default.

    ``wg`` is its projection; ``embeddings`` and ``temperature`` are parameters besides.
    """

    def adopt(self) -> None:
        """Draws a projection, the experts' embeddings and the temperature."""
        old = self.wg
        width, given = xmoe_width(old.out_features), old.weight
        self.wg = nn.Linear(old.in_features, width, bias=False).to(given.device, given.dtype)
        embeddings = nn.Linear(width, old.out_features, bias=False).to(given.device, given.dtype)
        self.embeddings = embeddings.weight
        self.temperature = nn.Parameter(given.new_full((1,), 0.07))

    def choose(self, tokens: torch.Tensor) -> Choice:
        """Chooses the largest logits."""
        logits = xmoe_logits(tokens, self.wg.weight, self.embeddings, self.temperature)
        return choose_xmoe(logits, self.k)


_GATES: dict[GateKind, type[PaperGate]] = {
    "gshard": GShardGate,
    "sigmoid": SigmoidGate,
    "xmoe": XMoEGate,
}


def put_gates(arguments: Mapping[str, Any], settings: Settings) -> None:
    """Gives a model's native MoE layers the gate that the settings ask for.

    Args:
        arguments: The arguments of ``deepspeed.initialize``.
        settings: Ask for another gate than DeepSpeed's.

    Raises:
        ConfigError: A layer asks for what that gate does not do, the model has no such layer, or
            parameters or an optimizer were given that have a replaced gate's.
    """
    kind = settings.gate
    model = arguments.get("model")
    modules = model.modules() if isinstance(model, nn.Module) else ()
    gates = [module.gate for module in modules if isinstance(module, MOELayer)]
    if not gates:
        raise settings.refusal(
            "gate",
            kind,
            'wanted "router", since the model has no deepspeed.moe.layer.MoE, whose gate it is',
        )
    for gate in gates:
        problem = _problem(gate, kind)
        if problem is not None:
            raise settings.refusal("gate", kind, f'{problem}, or wanted "router"')
    if kind == "xmoe":
        replaced = {id(parameter) for gate in gates for parameter in gate.wg.parameters()}
        if any(id(parameter) in replaced for parameter in _given_parameters(arguments)):
            raise settings.refusal(
                "gate",
                kind,
                "its parameters take the place of others, which deepspeed.initialize was given in "
                "a list or an optimizer; wanted model_parameters=model.parameters() and the "
                "optimizer in the configuration",
            )
    for gate in gates:
        if type(gate) is TopKGate:
            gate.__class__ = _GATES[kind]
            gate.adopt()


def gate_problem(layer: Any, settings: Settings) -> str | None:
    """Says what is wrong about a layer's gate by the settings."""
    gate = getattr(layer, "gate", None)
    wanted = _GATES.get(settings.gate)
    if wanted is None and not isinstance(gate, PaperGate):
        return None
    if wanted is not None and type(gate) is wanted:
        return None
    return (
        f'{SECTION}.gate is "{settings.gate}" and its gate is a {type(gate).__name__}: gates of '
        "deepspeed.moe.layer.MoE are put in place by initialize of flashmoe_megatron.deepspeed, "
        "before DeepSpeed sees the model; other layers have their own router"
    )


def _problem(gate: TopKGate, kind: GateKind) -> str | None:
    if type(gate) not in (TopKGate, _GATES[kind]):
        return f"a layer's gate is a {type(gate).__name__}; wanted a TopKGate"
    if gate.noisy_gate_policy not in (None, "None"):
        return f"noisy_gate_policy is {gate.noisy_gate_policy!r}; wanted None"
    if kind == "gshard" and gate.k != 2:
        return f"k is {gate.k}; wanted 2"
    if kind != "gshard" and gate.drop_tokens:
        return "drop_tokens is True, and this gate has no capacity; wanted drop_tokens=False"
    return None


def _given_parameters(arguments: Mapping[str, Any]) -> Iterator[Any]:
    """Yields parameters that were listed before; a generator lists them later."""
    given = arguments.get("model_parameters")
    groups = list(given) if isinstance(given, list | tuple) else []
    groups += getattr(arguments.get("optimizer"), "param_groups", [])
    for group in groups:
        yield from group["params"] if isinstance(group, dict) else [group]
