"""A forward of the kernel in blockwise FP8, by the C interface, on virtual ranks of one GPU."""

from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch

from flashmoe_megatron.blockwise import ROW, SQUARE, dequantize, pack, quantize
from flashmoe_megatron.config import MoEConfig
from tests.unit.test_blockwise import all_sizes, every_bit_pattern
from tools.bench.fp8_forward import Rank

pytestmark = pytest.mark.gpu

SMS = 132
BLOCK = 128


@dataclass(frozen=True)
class Case:
    """A layer.

    Attributes:
        tokens: The tokens of each rank.
        mean: The mean of tokens and of fc1's values: sums whose terms do not cancel show what
            products lose that are not promoted.
    """

    tokens: int
    hidden: int
    intermediate: int
    num_experts: int
    topk: int
    gated: bool = True
    num_ranks: int = 1
    split: bool = False
    mean: float = 0.0

    @property
    def config(self) -> MoEConfig:
        return MoEConfig(
            hidden=self.hidden,
            intermediate=self.intermediate,
            num_experts=self.num_experts,
            topk=self.topk,
            num_ranks=self.num_ranks,
            max_tokens=self.tokens,
            activation="silu",
            gated=self.gated,
            experts="fp8",
        )


CASES = {
    "gated": Case(512, 512, 256, 4, 2),
    "odd sizes": Case(777, 384, 640, 3, 2, gated=False),
    "odd sizes, gated": Case(777, 640, 896, 6, 3),
    "split": Case(300, 512, 384, 4, 2, split=True),
    "wide": Case(700, 512, 1280, 4, 2),
    "many rows a ticket": Case(640, 1024, 256, 8, 4),
    "two ranks": Case(640, 1024, 512, 8, 3, num_ranks=2),
    "four ranks": Case(333, 512, 768, 16, 4, num_ranks=4),
    "a mean": Case(256, 7168, 512, 2, 1, mean=2.0),
}


class Layer:
    """The ranks of a case, with random inputs."""

    def __init__(self, case: Case) -> None:
        self.case = case
        torch.manual_seed(1)
        every, local = case.tokens * case.num_ranks, case.num_experts // case.num_ranks
        rows = (2 if case.gated else 1) * case.intermediate

        def random(num_rows: int, width: int, mean: float, scale: float) -> torch.Tensor:
            values = torch.randn(num_rows, width, device="cuda") + mean
            return (values * scale).bfloat16()

        self.x = random(every, case.hidden, case.mean, 1)
        self.fc1 = [
            random(rows, case.hidden, case.mean, case.hidden**-0.5) for _ in range(case.num_experts)
        ]
        self.fc2 = [
            random(case.hidden, case.intermediate, 0, case.intermediate**-0.5)
            for _ in range(case.num_experts)
        ]
        chosen = torch.rand(every, case.num_experts, device="cuda").topk(case.topk).indices
        self.routing_map = torch.zeros(
            every, case.num_experts, dtype=torch.bool, device="cuda"
        ).scatter_(1, chosen, True)
        self.probs = torch.rand(every, case.num_experts, device="cuda")
        self.ranks = []
        for rank in range(case.num_ranks):
            fc1, fc2 = (kind[rank * local : (rank + 1) * local] for kind in (self.fc1, self.fc2))
            if case.split:
                halves = [one.split(case.intermediate) for one in fc1]
                fc1 = [gate for gate, _ in halves] + [up for _, up in halves]
            self.ranks.append(
                Rank(
                    case.config,
                    [one.contiguous() for one in fc1],
                    fc2,
                    rank=rank,
                    num_ctas=SMS // case.num_ranks // 2 * 2,
                    split=case.split,
                )
            )
        for one in self.ranks:
            one.join(self.ranks)

    def _own(self, rank: int) -> slice:
        return slice(rank * self.case.tokens, (rank + 1) * self.case.tokens)

    def forward(self, *, plan_apart: bool = False) -> torch.Tensor:
        """Outputs of all ranks' tokens."""
        torch.cuda.synchronize()
        for rank, one in enumerate(self.ranks):
            own = self._own(rank)
            given = self.x[own], self.probs[own], self.routing_map[own]
            one.forward(*given, plan_apart=plan_apart)
        self._end()
        return torch.cat([one.out for one in self.ranks]).clone()

    def gather(self) -> None:
        """Receives the last forward's rows again."""
        for one in self.ranks:
            one.rows.fill_(255)
        torch.cuda.synchronize()
        for rank, one in enumerate(self.ranks):
            one.gather(self.x[self._own(rank)])
        self._end()

    def _end(self) -> None:
        torch.cuda.synchronize()
        assert [one.fault() for one in self.ranks] == [""] * len(self.ranks)

    def oracle(self, tokens: torch.Tensor) -> torch.Tensor:
        """Outputs of some tokens, of products in float64 of what FP8 stands for."""
        out = torch.zeros(len(tokens), self.case.hidden, dtype=torch.float64, device="cuda")
        x = dequantize(quantize(self.x[tokens], ROW), torch.float64)
        for expert in range(self.case.num_experts):
            at = self.routing_map[tokens, expert].nonzero().flatten()
            fc1, fc2 = (
                dequantize(quantize(kind[expert], SQUARE), torch.float64)
                for kind in (self.fc1, self.fc2)
            )
            act = self.activated((x[at] @ fc1.T).bfloat16(), self.probs[tokens[at], expert])
            out[at] += (dequantize(quantize(act, ROW), torch.float64) @ fc2.T).bfloat16().double()
        return out

    def activated(self, preact: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        """Weighted activations, rounded to bfloat16."""
        parts = preact.float().split(self.case.intermediate, dim=1)
        value = torch.nn.functional.silu(parts[0])
        return ((value * parts[1] if self.case.gated else value) * probs.unsqueeze(1)).bfloat16()


class Received(NamedTuple):
    """The rows of one rank, as its plan has them.

    Attributes:
        token: Each row's token among all ranks', or -1.
        first: Where the first expert's rows begin, which are one after another.
        count: How many these are.
    """

    token: torch.Tensor
    first: int
    count: int

    @classmethod
    def by(cls, rank: Rank, tokens_of_rank: int) -> "Received":
        """Reads a plan; `moe/plan.cuh` says where its tables are."""
        slots = rank.config.num_local_experts

        def table(offset: int, count: int) -> torch.Tensor:
            return rank.plan[offset : offset + 4 * count].view(torch.int32)

        def behind(offset: int, num_bytes: int) -> int:
            return (offset + num_bytes + 255) // 256 * 256

        rows_at = behind(0, 16)
        block_at = behind(rows_at, 4 * slots)
        meta_at = behind(behind(block_at, 4 * (slots + 1)), 8 * rank.blocks)
        num_rows = BLOCK * int(table(0, 1))
        meta = table(meta_at, 2 * num_rows).view(num_rows, 2)
        token = meta[:, 0] + (meta[:, 1] & 255) * tokens_of_rank
        first, count = BLOCK * int(table(block_at, 1)), int(table(rows_at, 1))
        return cls(torch.where(meta[:, 0] < 0, -1, token).long(), first, count)

    def rows(self, buffer: torch.Tensor, block_bytes: int) -> torch.Tensor:
        """Rows of a buffer that has some bytes for each block of rows."""
        row_bytes = int(block_bytes) // BLOCK
        return buffer[: len(self.token) * row_bytes].view(-1, row_bytes)


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


def assert_rows_are_packed(layer: Layer) -> None:
    """Compares received rows with the quantizer's bytes, and pads with zeros."""
    packed = pack(quantize(layer.x, ROW))
    for rank in layer.ranks:
        received = Received.by(rank, layer.case.tokens)
        rows = received.rows(rank.rows, rank.sizes.row_block_bytes)
        is_token = received.token >= 0
        assert torch.equal(rows[is_token], packed[received.token[is_token]])
        assert not rows[~is_token].any()


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_a_forward_is_that_of_what_its_operands_stand_for(case: Case) -> None:
    layer = Layer(case)
    out = layer.forward()
    assert torch.equal(layer.forward(), out)
    tokens = torch.randperm(len(layer.x), device="cuda")[:192]
    # A value between two bfloat16 may be rounded to the other, and then to the other E4M3.
    assert distance(out[tokens], layer.oracle(tokens)) < 1e-2
    assert_rows_are_packed(layer)


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_products_are_promoted_and_activations_are_quantized_as_tokens_are(case: Case) -> None:
    layer = Layer(case)
    layer.forward()
    for of, rank in enumerate(layer.ranks):
        received = Received.by(rank, case.tokens)
        own = slice(received.first, received.first + received.count)
        tokens, expert = received.token[own], of * rank.config.num_local_experts
        preact = received.rows(rank.preact, rank.sizes.preact_block_bytes)[own].view(torch.bfloat16)
        x = dequantize(quantize(layer.x[tokens], ROW), torch.float64)
        wanted = x @ dequantize(quantize(layer.fc1[expert], SQUARE), torch.float64).T
        assert distance(preact, wanted) < 1.05 * distance(wanted.bfloat16(), wanted)

        act = pack(quantize(layer.activated(preact, layer.probs[tokens, expert]), ROW))
        row_bytes = act.shape[1]
        found = received.rows(rank.scratch, BLOCK * row_bytes)[own]
        end = (
            case.intermediate + case.intermediate // 32
        )  # behind it are pads, which are not written
        # The kernel's exponential is not torch's: few values are rounded to another bfloat16.
        assert (found[:, :end] != act[:, :end]).float().mean() < 1e-3


@pytest.mark.parametrize("name", ["gated", "two ranks"])
def test_a_plan_that_is_a_launch_of_its_own_changes_no_bit(name: str) -> None:
    layer = Layer(CASES[name])
    assert torch.equal(layer.forward(plan_apart=True), layer.forward())
    assert_rows_are_packed(layer)


@pytest.mark.parametrize("name", ["gated", "two ranks"])
def test_rows_are_received_again(name: str) -> None:
    layer = Layer(CASES[name])
    layer.forward()
    layer.gather()
    assert_rows_are_packed(layer)


def test_tokens_are_quantized_by_the_rule_whatever_they_hold() -> None:
    values = torch.cat([all_sizes()[1].flatten(), every_bit_pattern().flatten()])
    case = Case(len(values) // 512, 512, 256, 4, 2)
    layer = Layer(case)
    layer.x = values[-len(layer.x) * case.hidden :].view(layer.x.shape).cuda()
    layer.forward()
    (rank,) = layer.ranks
    received = Received.by(rank, case.tokens)
    rows = received.rows(rank.rows, rank.sizes.row_block_bytes)
    is_token = received.token >= 0
    wanted, found = pack(quantize(layer.x, ROW))[received.token[is_token]], rows[is_token]
    # The sign of a NaN is the converter's own.
    is_nan = wanted[:, : case.hidden] & 0x7F == 0x7F
    assert is_nan.any()
    assert torch.equal(found[:, : case.hidden] & 0x7F == 0x7F, is_nan)
    assert torch.equal(found[:, : case.hidden][~is_nan], wanted[:, : case.hidden][~is_nan])
    assert torch.equal(found[:, case.hidden :], wanted[:, case.hidden :])
